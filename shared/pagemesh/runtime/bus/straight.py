"""What a socket has is parsed as soon as it is there.

    nats-py    socket -> StreamReader -> [ its read loop wakes ] -> parser
    here       socket -> parser

A parse that has to wait for something, as after an error of the server it may, goes on in a task.
What comes meanwhile is the read loop's, as it was: it takes its turn, and bounds what waits. Else
the loop waits for the end of the connection alone. Until it waits a parse runs in no task: time
limits of asyncio do not work there from Python 3.12 on.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import nats.errors

from pagemesh.runtime.logs import get_logger

OnFailure = Callable[[Exception], Awaitable[None]]
Spawn = Callable[[Coroutine[Any, Any, None]], object]
_log = get_logger(__name__)


class StraightReader:
    """Takes over from ``reader`` what comes from now on. ``parser``: of nats-py, whose ``parse``
    the read loop calls, too. ``on_failure``: what cannot be parsed has come. ``spawn`` has a
    coroutine run as a task of whoever owns the connection."""

    def __init__(
        self, reader: asyncio.StreamReader, parser: Any, on_failure: OnFailure, spawn: Spawn
    ) -> None:
        self._reader = reader
        self._read_later = reader.feed_data
        self._parse = parser.parse
        self._on_failure = on_failure
        self._spawn = spawn
        self._turn = asyncio.Lock()
        parser.parse = self._in_turn
        reader.feed_data = self._feed  # type: ignore[method-assign,assignment]

    def _feed(self, data: bytes) -> None:
        # What came before is not read yet, or not parsed.
        if self._turn.locked() or self._reader._buffer:  # type: ignore[attr-defined]
            self._read_later(data)
            return
        parse = self._parse_all(data)
        try:
            waits_for = parse.send(None)
        except StopIteration:
            return
        self._spawn(_rest(parse, waits_for))

    async def _parse_all(self, data: bytes) -> None:
        try:
            await self._in_turn(data)
        except Exception as error:
            if not isinstance(error, nats.errors.ProtocolError | OSError):
                _log.error("bus.parse_crashed", error=error)
            await self._on_failure(error)

    async def _in_turn(self, data: bytes) -> None:
        async with self._turn:
            await self._parse(data)


async def _rest(begun: Coroutine[Any, Any, None], waits_for: Any) -> None:
    await _go_on(begun, waits_for)


@types.coroutine
def _go_on(begun: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """What is left of a coroutine that was begun by hand, and waits for something."""
    while True:
        got, raised = None, None
        try:
            got = yield waits_for
        except BaseException as error:
            raised = error
        try:
            waits_for = begun.throw(raised) if raised else begun.send(got)
        except StopIteration:
            return
