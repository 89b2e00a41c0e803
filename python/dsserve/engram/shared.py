"""Shared memory of one server on one node: a folder of mapped files that no death of a process leaves behind.

Every process of the server holds a shared lock on the folder while it lives, and an exclusive one on its own rank's
file. The kernel drops both when a process ends in whatever way, so "is it alive" and "is the folder stale" are
questions to the lock, with no guess from a clock or from process ids that another container may number otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Self

from dsserve.errors import ConfigError, EngineFault

logger = logging.getLogger(__name__)

#: First part of the name of every folder.
PREFIX = "dsserve-shm-"
_MEMORY_ROOT = Path("/dev/shm")
_CREATE_TRIES = 8
#: Bytes of the longest word of `HeldFile.release`.
_MAX_WORD = 64
#: Seconds between two looks for a folder that another process is to make.
_WAIT_S = 0.02


def memory_root() -> Path:
    """Return the folder of the node's shared memory: `/dev/shm`, or the temporary folder where there is none."""
    return _MEMORY_ROOT if _MEMORY_ROOT.is_dir() else Path(tempfile.gettempdir())


def free_bytes(root: Path | None = None) -> int:
    """Return the bytes that files of the shared memory may still take."""
    state = os.statvfs(root or memory_root())
    return state.f_bavail * state.f_frsize


def folder_name(ipc_dir: str | Path) -> str:
    """Return the folder's name that belongs to a server, whose socket directory is unique on the node."""
    return PREFIX + Path(ipc_dir).name.removeprefix("dsserve-")


def remove_folder(name: str, *, root: Path | None = None) -> None:
    """Remove a server's folder, if it is there. Maps of living processes stay valid."""
    shutil.rmtree((root or memory_root()) / name, ignore_errors=True)


def sweep(*, root: Path | None = None) -> list[str]:
    """Remove the folders of servers of which no process lives; returns their names."""
    base = root or memory_root()
    swept = []
    for path in sorted(base.glob(PREFIX + "*")):
        # Another process may sweep at the same time.
        with contextlib.suppress(OSError):
            if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid():
                continue
            with _Lock(path) as lock:
                if lock.try_exclusive():
                    shutil.rmtree(path, ignore_errors=True)
                    swept.append(path.name)
    if swept:
        logger.info("removed shared memory of servers that are gone: %s", ", ".join(swept))
    return swept


class SharedFolder:
    """One server's folder, held by one of its processes. Use it as a context manager, or call `close`."""

    def __init__(self, path: Path, lock: _Lock, *, is_owner: bool) -> None:
        """Use `create` or `open`."""
        self.path = path
        self._lock = lock
        self._is_owner = is_owner

    @classmethod
    def create(cls, name: str, *, root: Path | None = None) -> SharedFolder:
        """Make the folder, of mode 0700, after sweeping those of dead servers.

        Raises:
            ConfigError: If a living server has a folder of this name, or the shared memory cannot be written.
        """
        base = root or memory_root()
        sweep(root=base)
        path = base / name
        for _ in range(_CREATE_TRIES):
            try:
                path.mkdir(mode=0o700)
                lock = _Lock(path)
            except FileExistsError:
                raise ConfigError(f"{path} belongs to a server that is running") from None
            except FileNotFoundError:
                continue
            except OSError as error:
                raise ConfigError(
                    f"{base}: cannot hold shared memory: {error.strerror}; mount a tmpfs there"
                ) from None
            if lock.share() and lock.is_current(path):
                return cls(path, lock, is_owner=True)
            # Another process swept it in the moment before the lock was ours.
            lock.close()
            remove_folder(name, root=base)
        raise ConfigError(f"{path} is removed again and again; is something else cleaning {base}?")

    @classmethod
    def join(cls, name: str, *, root: Path | None = None, timeout_s: float) -> SharedFolder:
        """Join a folder that another process makes.

        Raises:
            ConfigError: If it has not made it in time.
        """
        path = (root or memory_root()) / name
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                lock = _Lock(path)
            except FileNotFoundError:
                time.sleep(_WAIT_S)
                continue
            if lock.share() and lock.is_current(path):
                return cls(path, lock, is_owner=False)
            lock.close()
        raise ConfigError(f"{path}: the first process of the server has not made it; see its log")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def allocate(self, name: str, num_bytes: int) -> mmap.mmap:
        """Make a file of so many zero bytes and map it.

        The memory is taken here: a lack of it is an error now and no SIGBUS later.

        Raises:
            ConfigError: If there is not enough, with the number of bytes needed.
        """
        descriptor = os.open(self.path / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            if num_bytes:
                os.posix_fallocate(descriptor, 0, num_bytes)
            return mmap.mmap(descriptor, num_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            (self.path / name).unlink()
            raise ConfigError(
                f"{self.path}: {num_bytes} bytes are needed, {free_bytes(self.path)} are free; give the "
                "shared memory more (docker: --shm-size), or choose another --engram-placement",
                param="--engram-placement",
            ) from None
        finally:
            os.close(descriptor)

    def map(self, name: str, num_bytes: int) -> mmap.mmap:
        """Map a file that another process allocated, for reading.

        Raises:
            EngineFault: If it is missing or has another size.
        """
        try:
            descriptor = os.open(self.path / name, os.O_RDONLY)
        except FileNotFoundError:
            raise EngineFault(f"{self.path / name} is gone: its server has ended") from None
        try:
            size = os.fstat(descriptor).st_size
            if size != num_bytes:
                raise EngineFault(f"{self.path / name} has {size} bytes, not {num_bytes}")
            return mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)

    def claim(self, name: str) -> HeldFile:
        """Make a file and hold it until the process ends; see `watch`."""
        draft = self.path / f"{name}.{os.getpid()}.part"
        descriptor = os.open(draft, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        draft.rename(self.path / name)  # locked before anybody can look
        return HeldFile(descriptor)

    def watch(self, name: str) -> WatchedFile | None:
        """Look at a file that another process claims; None if it has not yet."""
        try:
            return WatchedFile(os.open(self.path / name, os.O_RDONLY))
        except FileNotFoundError:
            return None

    def publish(self, name: str, text: str = "") -> None:
        """Make a small file appear at once with its whole content."""
        draft = self.path / f"{name}.{os.getpid()}.part"
        draft.write_text(text, encoding="utf-8")
        draft.rename(self.path / name)

    def read(self, name: str) -> str | None:
        """Return what was published under a name; None if nothing was."""
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def close(self) -> None:
        """Let go; the process that made the folder removes it. A second call does nothing."""
        if self._is_owner:
            self._is_owner = False
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


class HeldFile:
    """A file that this process has claimed."""

    def __init__(self, descriptor: int) -> None:
        """Take over an open and locked file."""
        self._descriptor: int | None = descriptor

    def release(self, word: bytes) -> None:
        """Let go on purpose, with a word to those who watch. A second call does nothing."""
        if self._descriptor is not None:
            os.write(self._descriptor, word)
            os.close(self._descriptor)
            self._descriptor = None


class WatchedFile:
    """A file that another process has claimed; it can be watched even after the folder is removed."""

    def __init__(self, descriptor: int) -> None:
        """Take over an open file."""
        self._descriptor = descriptor

    def has_ended(self, *, without: bytes) -> bool:
        """Whether the process that claimed it has let go, by its death or with any other word than `without`."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return os.pread(self._descriptor, _MAX_WORD, 0) != without

    def close(self) -> None:
        """Look no more."""
        os.close(self._descriptor)


class _Lock:
    """The lock on a folder itself."""

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def share(self) -> bool:
        return self._take(fcntl.LOCK_SH)

    def try_exclusive(self) -> bool:
        return self._take(fcntl.LOCK_EX)

    def is_current(self, path: Path) -> bool:
        """Whether the path still names the locked folder."""
        try:
            there = path.stat()
        except FileNotFoundError:
            return False
        return self._descriptor is not None and os.path.samestat(there, os.fstat(self._descriptor))

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _take(self, kind: int) -> bool:
        if self._descriptor is None:
            return False
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
