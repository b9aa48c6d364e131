"""Runs work that recurses as deep as its input is long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_STACK_BYTES = 512 << 20
"""Only what is used takes memory."""
_starting = threading.Lock()
T = TypeVar("T")


def on_deep_stack(work: Callable[[], T]) -> T:
    """``work()``, on a thread of its own with a deep stack. In a compiler that has no bound on its
    recursion, an ordinary stack would overflow, which ends the process."""
    future = Future[T]()
    thread = threading.Thread(target=_run, args=(work, future), name="deep-stack", daemon=True)
    with _starting:  # the size is the whole process's; it costs other threads nothing
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return future.result()


def _run(work: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
