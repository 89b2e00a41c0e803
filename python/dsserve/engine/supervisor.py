"""Who starts the engine process, notices its end, and leaves nothing behind?"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dsserve.config.env import engine_environment
from dsserve.engram.shared import folder_name, remove_folder, sweep
from dsserve.errors import ConfigError
from dsserve.protocol import engine as wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsserve.config.server import ServerConfig

logger = logging.getLogger(__name__)

CONFIG_FILE = "engine.json"
MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path on Linux."""

_KILL_WAIT_S = 10.0
_SECRETS: dict[str, Any] = {"api_key": (), "admin_api_key": None}


class EngineSupervisor:
    """One engine process and the directory of its sockets.

    `start` and `stop` are called on one event loop, on which `on_exit` is called too.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        on_exit: Callable[[int], None] | None = None,
        protocol_version: int = wire.PROTOCOL_VERSION,
    ) -> None:
        """Make the socket directory, of mode 0700; nothing is started.

        Args:
            config: Its `model_path` must be set.
            on_exit: Called with the exit code when the process ends though `stop` was not called
                (negative: the number of the signal that killed it).
            protocol_version: Written into the engine's configuration.

        Raises:
            ConfigError: `model_path` is not set, or no directory with a short enough path exists.
        """
        if config.model_path is None:
            raise ConfigError("--model-path is not set", param="--model-path")
        self._config = config
        self._on_exit = on_exit
        self._protocol_version = protocol_version
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: threading.Thread | None = None
        self._ended = asyncio.Event()
        self._is_stopping = False
        self.ipc_dir = _make_ipc_dir()

    @property
    def returncode(self) -> int | None:
        """Exit code of the process; None while it runs or before it was started."""
        return self._process.returncode if self._process is not None else None

    @property
    def process_id(self) -> int | None:
        """Id of the process, once started."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start `python -m dsserve.engine`. Its log goes to this process's stderr.

        Shared memory of servers that died without a word is removed first.
        """
        sweep()
        path = self.ipc_dir / CONFIG_FILE
        path.write_bytes(msgspec.json.encode(self._engine_config()))
        self._process = subprocess.Popen(  # noqa: ASYNC220 - returns once the child has started
            [sys.executable, "-m", "dsserve.engine", str(path)],
            stdin=subprocess.DEVNULL,
            env=engine_environment(),
        )
        logger.info("engine process %d started", self._process.pid)
        loop = asyncio.get_running_loop()
        self._watcher = threading.Thread(
            target=self._watch, args=(self._process, loop), name="engine watcher", daemon=True
        )
        self._watcher.start()

    async def wait(self) -> int:
        """Wait for the process to end; returns its exit code."""
        await self._ended.wait()
        return self.returncode or 0

    def kill(self) -> None:
        """End the process at once, whatever it does; `on_exit` is told."""
        if self._process is not None:
            self._process.kill()

    async def stop(self, *, timeout_s: float) -> None:
        """End the process; remove the socket directory and shared memory. A second call does nothing.

        Args:
            timeout_s: How long a process that was asked to shut down by message may take; then it
                is killed. The engine ignores SIGTERM, which whoever stops the server may send to
                both processes at once.
        """
        self._is_stopping = True
        if self._process is not None and not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._ended.wait()
            if not self._ended.is_set():
                logger.warning("killing engine process %d", self._process.pid)
                self._process.kill()
                async with asyncio.timeout(_KILL_WAIT_S):
                    await self._ended.wait()
        if self._watcher is not None:
            self._watcher.join()
        remove_folder(folder_name(self.ipc_dir))
        shutil.rmtree(self.ipc_dir, ignore_errors=True)

    def _engine_config(self) -> wire.EngineConfig:
        config = self._config
        return wire.EngineConfig(
            server=config.replace(**_SECRETS).to_dict(),
            model_path=str(config.model_path),
            ipc_dir=str(self.ipc_dir),
            protocol_version=self._protocol_version,
            parent_pid=os.getpid(),
            log_level=config.log_level,
            log_json=config.log_json,
        )

    def _watch(self, process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> None:
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop was closed without `stop`
            loop.call_soon_threadsafe(self._process_ended, code)

    def _process_ended(self, code: int) -> None:
        self._ended.set()
        logger.info("engine process ended with code %d", code)
        if self._on_exit is not None and not self._is_stopping:
            self._on_exit(code)


def _make_ipc_dir() -> Path:
    """Make a directory of mode 0700 whose socket paths fit into a Unix address."""
    longest = max(len(wire.TO_ENGINE_SOCKET), len(wire.FROM_ENGINE_SOCKET)) + 1
    for parent in (None, "/tmp"):
        path = Path(tempfile.mkdtemp(prefix="dsserve-", dir=parent))
        if len(os.fsencode(path)) + longest <= MAX_SOCKET_PATH:
            return path
        path.rmdir()
    raise ConfigError(
        f"the temporary directory {tempfile.gettempdir()} has too long a path for sockets; "
        "set TMPDIR to a shorter one"
    )
