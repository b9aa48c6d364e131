"""What a socket has is parsed as soon as it is there.

    nats-py    socket -> StreamReader -> [ its read loop wakes ] -> parser
    here       socket -> parser

The read loop waits on, for the end of the connection alone. A parse that has to wait for something,
as after an error of the server it may, goes on in a task, and what comes meanwhile is parsed in its
turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

OnFailure = Callable[[Exception], Awaitable[None]]


class StraightReader:
    """Takes over from ``reader`` what comes from now on. ``parser``: of nats-py, whose ``parse``
    the read loop calls, too. ``on_failure``: what cannot be parsed has come."""

    def __init__(self, reader: asyncio.StreamReader, parser: Any, on_failure: OnFailure) -> None:
        self._reader = reader
        self._read_later = reader.feed_data
        self._parse = parser.parse
        self._on_failure = on_failure
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        parser.parse = self._in_turn
        reader.feed_data = self._feed  # type: ignore[method-assign,assignment]

    def _feed(self, data: bytes) -> None:
        if self._reader._buffer:  # type: ignore[attr-defined]  # came before us, and is not read yet
            self._read_later(data)
            return
        parse = self._parse_all(data)
        try:
            waits_for = parse.send(None)
        except StopIteration:
            return
        task = asyncio.get_running_loop().create_task(_rest(parse, waits_for))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _parse_all(self, data: bytes) -> None:
        try:
            await self._in_turn(data)
        except Exception as error:
            await self._on_failure(error)

    async def _in_turn(self, data: bytes) -> None:
        async with self._turn:
            await self._parse(data)


async def _rest(begun: Coroutine[Any, Any, None], waits_for: Any) -> None:
    await _Rest(begun, waits_for)


class _Rest:
    """What is left of a coroutine that was begun by hand, and waits for something."""

    def __init__(self, begun: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._begun = begun
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        while True:
            got, raised = None, None
            try:
                got = yield waits_for
            except BaseException as error:
                raised = error
            try:
                waits_for = self._begun.throw(raised) if raised else self._begun.send(got)
            except StopIteration:
                return
