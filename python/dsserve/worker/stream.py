"""How does a step run beside the step loop on a machine without CUDA?

`Stream` is the CPU stand-in of a CUDA stream: one thread that runs what is submitted in order, a
completion per submission, and an error that sticks: after the first exception nothing else runs and
every later completion raises it, as after a CUDA error.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class StreamClosed(RuntimeError):  # noqa: N818 - says what happened, like zmq.ContextTerminated
    """Work was submitted to a stream after `close`."""


class Completion(Generic[T]):
    """The event after one submission, and its result."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Say without waiting whether the work has ended, well or badly."""
        return self._event.is_set()

    def wait_done(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the work to end; say whether it did."""
        return self._event.wait(timeout_s)

    def wait(self) -> T:
        """Wait for the work; returns its result or raises its exception."""
        self._event.wait()
        if self._error is not None:
            raise self._error
        return cast("T", self._result)

    def _resolve(self, result: T) -> None:
        self._result = result
        self._event.set()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._event.set()


class Stream:
    """One thread with a queue. Submitting is cheap and never waits for the work."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Completion[T]:
        """Queue `work` behind everything submitted before.

        Raises:
            StreamClosed: After `close`.
        """
        if self._is_closed:
            raise StreamClosed(self._thread.name)
        completion: Completion[T] = Completion()
        self._queue.put(lambda: self._perform(work, completion))
        return completion

    def synchronize(self) -> None:
        """Wait for everything submitted so far; raises the stream's error if it has one."""
        self.submit(_nothing).wait()

    def close(self) -> None:
        """Let the queued work end, then end the thread. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (perform := self._queue.get()) is not None:
            perform()

    def _perform(self, work: Callable[[], T], completion: Completion[T]) -> None:
        if self._error is not None:
            completion._fail(self._error)
            return
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - the edge of the thread; `wait` raises it
            self._error = error
            completion._fail(error)
        else:
            completion._resolve(result)


def _nothing() -> None:
    pass
