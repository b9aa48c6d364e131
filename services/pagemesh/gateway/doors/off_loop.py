"""Runs work on long texts off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

THREAD_BYTES_MIN = 16 << 10
"""Longer texts are processed on a thread, so that other requests are not held up."""
LARGE_BYTES_MIN = 1 << 20
T = TypeVar("T")


class _Job(NamedTuple):
    future: Future[Any]
    work: list[Callable[[], Any]]
    """One, or none once the future is done: the body it is for is not kept for a cancelled job."""


class Turns:
    """Does jobs one after the other on a thread of its own; owners take turns."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        """By owner; the first has the next turn."""

    def submit(self, owner: str, work: Callable[[], T]) -> Future[T]:
        """A job that is cancelled before its turn is left out."""
        future, held = Future[T](), [work]
        future.add_done_callback(lambda _: held.clear())
        with self._lock:
            self._waiting.setdefault(owner, deque()).append(_Job(future, held))
        self._thread.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        """Called once for each job, but whichever has its turn is done."""
        job = self._take()
        if job is None:
            return
        try:
            job.future.set_result(job.work.pop()())
        except BaseException as error:
            job.future.set_exception(error)
        finally:
            del job  # or the error would keep it, by its traceback, and itself

    def _take(self) -> _Job | None:
        """The next job that is wanted; its owner goes to the end."""
        with self._lock:
            while self._waiting:
                owner, jobs = self._waiting.popitem(last=False)
                while jobs:
                    job = jobs.popleft()
                    if not job.future.set_running_or_notify_cancel():
                        continue
                    if jobs:
                        self._waiting[owner] = jobs
                    return job
        return None


_LARGE = Turns("large-body")


async def off_loop(
    size_bytes: int,
    work: Callable[[], T],
    *,
    owner: str = "",
    bytes_min: int = THREAD_BYTES_MIN,
) -> T:
    """``work()``, on a thread when its input is long. Inputs of megabytes wait for one thread of
    their own: eight of them kept all other threads busy, and so delayed all long bodies, for a
    minute. There the owners (tenants) take turns."""
    if size_bytes < bytes_min:
        return work()
    if size_bytes < LARGE_BYTES_MIN:
        return await asyncio.to_thread(work)
    return await asyncio.wrap_future(_LARGE.submit(owner, work))
