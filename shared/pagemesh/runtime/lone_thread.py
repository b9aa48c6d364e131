"""A thread for work that may never return, such as reading from a disk.

At exit Python waits for the threads of a ``ThreadPoolExecutor``, however it was shut down, so one
that hangs keeps its process alive for good. Python does not wait for this thread: code that needs
its work to be done has to wait for that.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_Work = tuple[Future[Any], Callable[[], object]]


class LoneThread(Executor):
    """An executor with one thread, which makes the calls in order."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread = Thread(target=_serve, args=(self._queue,), name=name, daemon=True)
        self._lock = Lock()
        self._is_started = self._is_shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have ``fn`` called. Raises ``RuntimeError`` after ``shutdown``."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_shut:
                raise RuntimeError(f"{self._thread.name} was shut down")
            self._queue.put((future, partial(fn, *args, **kwargs)))
            if not self._is_started:
                self._thread.start()
                self._is_started = True
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take nothing new, and end when all is done; ``cancel_futures``: cancel what has not
        begun."""
        with self._lock:
            self._is_shut = True
            waiting = _emptied(self._queue) if cancel_futures else []
            self._queue.put(None)
        for future, _ in waiting:
            future.cancel()
        if wait and self._is_started:
            self._thread.join()


def _emptied(queue: SimpleQueue[_Work | None]) -> list[_Work]:
    found: list[_Work] = []
    while True:
        try:
            work = queue.get_nowait()
        except Empty:
            return found
        if work is not None:
            found.append(work)


def _serve(queue: SimpleQueue[_Work | None]) -> None:
    while (work := queue.get()) is not None:
        future, call = work
        del work  # its objects are not kept alive until the next call comes
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del future, call
