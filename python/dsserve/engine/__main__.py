"""The engine process: `python -m dsserve.engine CONFIG.json`.

Started by `engine/supervisor.py`. Reads its configuration, builds the worker and the scheduler, runs the
step loop, and exits with one of `protocol.engine.ExitCode`. SIGINT and SIGTERM are left to the API process
that started it: it drains, then sends `Shutdown`; if it dies, the watchdog ends this process.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from dsserve import _native
from dsserve.config.model import ModelConfig, load_model_config
from dsserve.config.resolve import resolve
from dsserve.config.server import ServerConfig
from dsserve.engine.inbox import Inbox, LiveRequests, ProtocolMismatch
from dsserve.engine.loop import StepLoop
from dsserve.engine.memory import MemoryPlan, plan_memory
from dsserve.engine.outbox import HIGH_WATER_MARK, Outbox
from dsserve.engine.settings import draft_len, most_request_tokens, scheduler_config
from dsserve.engine.watchdog import Watchdog
from dsserve.errors import ConfigError
from dsserve.observe.log import StepLog, setup_logging
from dsserve.protocol import engine as wire
from dsserve.protocol.engine import EngineConfig, ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsserve.worker.base import Worker

logger = logging.getLogger("dsserve.engine")

LAST_MESSAGES_MS = 2000
"""How long the process stays for its last messages to be read."""

SWITCH_INTERVAL_S = 0.0005
"""The interpreter lock changes hands after at most this long, so that a worker that computes in Python
does not hold up the step loop for the default of 5 ms."""


def main(arguments: list[str]) -> int:
    """Run an engine process; returns its exit code."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m dsserve.engine CONFIG.json\n")
        return ExitCode.CONFIG
    try:
        config = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=EngineConfig)
    except (OSError, msgspec.DecodeError) as error:
        sys.stderr.write(f"cannot read {arguments[0]}: {error}\n")
        return ExitCode.CONFIG
    setup_logging(config.log_level, use_json=config.log_json, process="engine")
    if config.protocol_version != wire.PROTOCOL_VERSION:
        logger.error(
            "the API process speaks protocol version %d, this engine %d; both must come from one "
            "installation",
            config.protocol_version,
            wire.PROTOCOL_VERSION,
        )
        return ExitCode.PROTOCOL
    if config.parent_pid:
        # They go to the whole process group; the parent ends this process, and if it dies the watchdog does.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return _Engine(config).run()


class _Engine:
    """Everything that lives as long as the process."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._server = ServerConfig.from_dict(config.server)
        self._started_s = time.monotonic()
        self._worker: Worker | None = None

    def run(self) -> int:
        """Load, serve, clean up; returns the exit code."""
        watchdog = Watchdog(
            timeout_s=self._server.watchdog_timeout,
            parent_pid=self._config.parent_pid,
            ipc_dir=self._config.ipc_dir,
        )
        watchdog.start()
        with zmq.Context() as context:
            receiver = context.socket(zmq.PULL)
            receiver.bind(f"ipc://{Path(self._config.ipc_dir) / wire.TO_ENGINE_SOCKET}")
            sender = context.socket(zmq.PUSH)
            sender.set_hwm(HIGH_WATER_MARK)
            sender.connect(f"ipc://{Path(self._config.ipc_dir) / wire.FROM_ENGINE_SOCKET}")
            outbox = Outbox(sender)
            try:
                code = self._run_with(Inbox(receiver), outbox, watchdog)
            finally:
                watchdog.stop()
                receiver.close(linger=0)
                sender.close(linger=LAST_MESSAGES_MS)
        return code

    def _run_with(self, inbox: Inbox, outbox: Outbox, watchdog: Watchdog) -> ExitCode:
        outbox.send(wire.Hello(process_id=os.getpid()))
        try:
            loop = self._build(inbox, outbox)
            watchdog.watch(loop.progress)
            loop.run()
            if self._worker is not None:
                self._worker.close()
        except ConfigError as error:
            logger.error("%s", error)  # noqa: TRY400 - a wrong setting, not a failure of ours
            outbox.try_send(wire.Fatal(message=str(error)))
            return ExitCode.CONFIG
        except ProtocolMismatch as error:
            logger.error("%s", error)  # noqa: TRY400 - says all there is
            outbox.try_send(wire.Fatal(message=str(error)))
            return ExitCode.PROTOCOL
        except Exception as error:
            logger.critical("the engine failed", exc_info=error)
            outbox.try_send(wire.Fatal(message=f"{type(error).__name__}: {error}"))
            return ExitCode.FAULT
        logger.info("the engine ended")
        return ExitCode.OK

    def _build(self, inbox: Inbox, outbox: Outbox) -> StepLoop:
        config = self._config
        model = load_model_config(config.model_path, self._server.json_model_override_args)
        server = resolve(self._server.replace(model_path=config.model_path), model)
        memory = plan_memory(server, model)
        logger.info(
            "KV pool: %d pages of %d tokens (%d tokens, %.1f MiB with %d request slots), from %s",
            memory.num_pages,
            memory.page_size,
            memory.num_tokens,
            memory.total_bytes / 2**20,
            memory.num_slots,
            memory.reason,
        )
        if not (server.enable_encoder_swa_bounded_replay or server.disable_radix_cache):
            logger.info(
                "no prefix hits: without encoder replay nothing rebuilds the window after one"
            )
        settings = scheduler_config(server, model, num_pages=memory.num_pages)
        try:
            scheduler = _native.Scheduler(json.dumps(settings))
        except _native.SchedulerError as error:
            raise ConfigError(f"the scheduler refuses its configuration: {error}") from error
        capacity = {
            **scheduler.plan_capacity(),
            "pages": memory.num_pages,
            "page_size": memory.page_size,
        }
        is_fake = server.load_format == "fake"
        module = "fake" if is_fake else "cuda_build" if server.device == "cuda" else "worker"
        build_worker: Callable[..., Worker] = importlib.import_module(
            f"dsserve.worker.{module}"
        ).build_worker
        resolved = msgspec.structs.replace(config, server=server.to_dict())
        worker = self._worker = build_worker(
            resolved,
            capacity,
            lambda stage, done, total: outbox.send(
                wire.LoadProgress(stage=stage, done=done, total=total)
            ),
        )
        scheduler.register_buffers(worker.buffer_sets())
        loop = StepLoop(
            scheduler=scheduler,
            worker=worker,
            inbox=inbox,
            outbox=outbox,
            requests=LiveRequests(has_scripts=is_fake, draft_len=draft_len(server)),
            draft_len=draft_len(server),
            step_log=StepLog(decode_interval=server.decode_log_interval),
            is_overlapped=not server.disable_overlap_schedule,
        )
        load_s = time.monotonic() - self._started_s
        info = _info(config, server, model, memory, settings)
        info |= {"pool_table": scheduler.pool_table(), "load_s": round(load_s, 3)}
        outbox.send(wire.Ready(info=info))
        logger.info("ready after %.1f s", load_s)
        return loop


def _info(
    config: EngineConfig,
    server: ServerConfig,
    model: ModelConfig,
    memory: MemoryPlan,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """What `/get_server_info` shows of the engine."""
    return {
        "config": server.to_public_dict(),
        "scheduler": settings,
        "model_path": config.model_path,
        "architecture": model.architecture,
        "vocab_size": model.vocab_size,
        "sliding_window": model.sliding_window,
        "eos_token_ids": list(model.eos_token_ids),
        "context_length": server.context_length,
        "page_size": memory.page_size,
        "num_pages": memory.num_pages,
        "max_total_num_tokens": memory.num_tokens,
        "max_request_tokens": most_request_tokens(server, memory.num_tokens),
        "kv_bytes_per_token": memory.bytes_per_token,
        "kv_bytes_per_page": memory.bytes_per_page,
        "kv_bytes_per_slot": memory.bytes_per_slot,
        "kv_total_bytes": memory.total_bytes,
        "process_id": os.getpid(),
        "versions": {
            "python": platform.python_version(),
            "protocol": wire.PROTOCOL_VERSION,
            **_versions("dsserve", "torch", "numpy", "msgspec", "pyzmq"),
        },
    }


def _versions(*distributions: str) -> dict[str, str]:
    versions = {}
    for name in distributions:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
