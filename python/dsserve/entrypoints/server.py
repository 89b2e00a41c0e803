"""Runs a server: binds the port, starts the engine process, serves HTTP, and ends the way it was told to.

Exit codes: 0 after SIGTERM or SIGINT and a drain, 2 for a configuration that cannot work, 3 when the engine
process died, 128 + the signal's number when a second signal cut the drain short.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import signal
import socket
import sys
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from dsserve.config.model import load_model_config
from dsserve.engine.supervisor import EngineSupervisor
from dsserve.entrypoints.admin import run_probe
from dsserve.entrypoints.app import create_app
from dsserve.entrypoints.http_protocol import HttpProtocol
from dsserve.entrypoints.progress import LoadingBar
from dsserve.entrypoints.state import ServerState, build_state
from dsserve.errors import ConfigError, DsserveError, EngineLost, NotReady
from dsserve.frontend.client import EngineClient
from dsserve.observe.log import setup_logging
from dsserve.protocol.engine import ExitCode

if TYPE_CHECKING:
    from collections.abc import Generator

    from dsserve.config.server import ServerConfig

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_CONFIG = 2
EXIT_ENGINE_DIED = 3

WARM_UP_TIMEOUT_S = 300.0
# How long responses may take to leave once nothing is computed any more.
LAST_BYTES_TIMEOUT_S = 10.0
ENGINE_STOP_TIMEOUT_S = 15.0
KEEP_ALIVE_TIMEOUT_S = 75
# An engine process ends itself after `--watchdog-timeout`; one that cannot even do that (stopped, stuck in
# the kernel) is killed this much later.
SILENCE_MARGIN_S = 10.0
SILENCE_POLL_S = 1.0


def run_server(config: ServerConfig) -> int:
    """Serve until told to stop.

    Args:
        config: Resolved configuration.

    Returns:
        The exit code of the process.

    Raises:
        ConfigError: The port is in use, or the tokenizer cannot be read.
    """
    setup_logging(config.log_level, use_json=config.log_json, process="api")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    with (
        contextlib.closing(bind(config.host, config.port)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_Server(config, listener).run())


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket, so that a port in use is known before anything is loaded.

    Raises:
        ConfigError: If the port is in use, or the address is none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}", param="--host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port {port}: already in use on {host}; stop what listens there or choose "
                "another port",
                param="--port",
            ) from None
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}", param="--host"
        ) from None
    return listener


class _HttpServer(uvicorn.Server):
    """Uvicorn without signal handlers of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals to `_Server`."""
        yield


class _Server:
    """One run of a server."""

    def __init__(self, config: ServerConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._signals: list[int] = []
        self._stop_asked = asyncio.Event()
        self._engine_died = asyncio.Event()
        self._was_ready = False
        self._is_ending = False
        self._is_engine_deaf = False

    async def run(self) -> int:
        """Serve until a signal comes or the engine dies; return the exit code."""
        self._handle_signals()
        config = self._config
        model_config = load_model_config(str(config.model_path), config.json_model_override_args)
        with LoadingBar() as bar:
            supervisor = EngineSupervisor(config, on_exit=self._on_engine_exit)
            self._supervisor = supervisor
            client = EngineClient(supervisor.ipc_dir, on_progress=bar.update)
            try:
                state = self._state = build_state(config, model_config, client)
            except ConfigError:
                await supervisor.stop(timeout_s=0.0)
                raise
            http = self._http = _HttpServer(
                uvicorn.Config(
                    create_app(state),
                    log_config=None,
                    access_log=False,
                    lifespan="off",
                    ws="none",
                    http=HttpProtocol,
                    server_header=False,
                    timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
                    timeout_graceful_shutdown=int(LAST_BYTES_TIMEOUT_S),
                )
            )
            try:
                await client.start()
                await supervisor.start()
                serving = asyncio.create_task(http.serve(sockets=[self._listener]))
                starting = asyncio.create_task(self._become_ready(bar))
                stopping = asyncio.create_task(self._wait_for_end(state))
                guarding = asyncio.create_task(self._guard_engine(client))
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
                http.should_exit = True
                starting.cancel()
                guarding.cancel()
                await asyncio.gather(serving, starting, guarding, return_exceptions=True)
                stopping.cancel()
                await asyncio.gather(stopping, return_exceptions=True)
            finally:
                await self._end_engine(state)
        return self._exit_code()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: it outlives its terminal
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        self._signals.append(number)
        self._stop_asked.set()
        if len(self._signals) == 1:
            return
        logger.warning("second signal: stopping at once")
        if hasattr(self, "_http"):
            self._state.client.fail_all(_shut_down_early())
            self._http.force_exit = True

    def _on_engine_exit(self, code: int) -> None:
        if self._is_ending:
            return
        logger.error("the engine process ended with code %d", code)
        self._state.client.fail_all(
            EngineLost(f"the engine process ended with code {code}; the server ends, too")
        )
        self._engine_died.set()

    async def _guard_engine(self, client: EngineClient) -> None:
        """Kill an engine process that is silent for too long; its requests would hang otherwise."""
        limit_s = self._config.watchdog_timeout + SILENCE_MARGIN_S
        num_silent = 0
        while num_silent < 2:  # twice: the first time, heartbeats may wait to be read here
            await asyncio.sleep(SILENCE_POLL_S)
            is_silent = client.is_ready and client.silence_s > limit_s
            num_silent = num_silent + 1 if is_silent else 0
        logger.critical(
            "no sign of life from the engine process for %.0f s: killing it", client.silence_s
        )
        self._supervisor.kill()

    async def _become_ready(self, bar: LoadingBar) -> None:
        state = self._state
        problem = await self._wait_warm(state)
        bar.close()
        if problem is not None:
            # The engine process logged its traceback.
            logger.error("the server did not become ready: %s", problem)
            self._engine_died.set()
            return
        state.is_warm = self._was_ready = True
        _say(ready_message(state))

    async def _wait_warm(self, state: ServerState) -> str | None:
        """Return None once the first request was answered, else what went wrong."""
        try:
            await state.client.wait_ready()
            if not self._config.skip_server_warmup:
                await run_probe(state, timeout_s=WARM_UP_TIMEOUT_S)
        except DsserveError as error:
            return str(error)
        except TimeoutError:
            return f"no token came within {WARM_UP_TIMEOUT_S:g} s"
        return None

    async def _wait_for_end(self, state: ServerState) -> None:
        """Return when the HTTP server may go: the engine died, or a signal came and all is drained."""
        died = asyncio.create_task(self._engine_died.wait())
        drained = asyncio.create_task(self._drain(state))
        try:
            await asyncio.wait({died, drained}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (died, drained):
                task.cancel()
            await asyncio.gather(died, drained, return_exceptions=True)

    async def _drain(self, state: ServerState) -> None:
        await self._stop_asked.wait()
        state.is_draining = True
        grace_s = self._config.shutdown_grace_period
        if state.live:
            logger.info(
                "draining %d requests for at most %g s; a second signal stops at once",
                len(state.live),
                grace_s,
            )
        try:
            async with asyncio.timeout(grace_s):
                await state.live.wait_empty()
        except TimeoutError:
            logger.warning("aborting %d requests after the grace period", len(state.live))
            state.client.abort_all()
            try:
                async with asyncio.timeout(LAST_BYTES_TIMEOUT_S):
                    await state.live.wait_empty()
            except TimeoutError:
                logger.warning("the engine process does not answer: it will be killed")
                self._is_engine_deaf = True
                state.client.fail_all(_shut_down_early())
                await asyncio.sleep(0)  # the streams write their last event

    async def _end_engine(self, state: ServerState) -> None:
        self._is_ending = True
        state.client.shutdown(grace_s=0.0)  # says nothing to an engine that is lost
        is_hurried = len(self._signals) > 1 or self._is_engine_deaf
        # Also an engine that failed gets the time to end by itself, for the sake of its exit code.
        await self._supervisor.stop(timeout_s=0.0 if is_hurried else ENGINE_STOP_TIMEOUT_S)
        await state.client.close()
        state.executor.shutdown(wait=False, cancel_futures=True)

    def _exit_code(self) -> int:
        if self._engine_died.is_set():
            is_config = self._supervisor.returncode == ExitCode.CONFIG and not self._was_ready
            return EXIT_CONFIG if is_config else EXIT_ENGINE_DIED
        if len(self._signals) > 1:
            return 128 + self._signals[-1]
        return EXIT_OK


def _shut_down_early() -> NotReady:
    return NotReady("the server shut down before the answer was complete", code="shutting_down")


def ready_message(state: ServerState) -> str:
    """Return what is printed once requests are taken: where, and a line to try."""
    config = state.config
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    url = f"http://[{host}]:{config.port}" if ":" in host else f"http://{host}:{config.port}"
    body = {
        "model": state.model.names[0],
        "messages": [{"role": "user", "content": "Hello"}],
    }
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.api_key else ""
    return (
        f"dsserve is ready: {state.model.names[0]} at {url}\n"
        f"Try: curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        f"-d '{json.dumps(body)}'"
    )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
