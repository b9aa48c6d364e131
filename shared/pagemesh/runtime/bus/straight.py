"""Received bytes are parsed at once, in the callback that receives them.

    nats-py    socket -> StreamReader -> [ its read loop wakes ] -> parser
    here       socket -> parser

A parse that has to wait for something, as it may after an error from the server, continues in a
task. Bytes that arrive meanwhile go to nats-py's read loop as usual, which takes its turn and
bounds how many wait. Otherwise that loop only waits for the end of the connection. Until it first
waits, a parse runs outside any task, where asyncio's timeouts do not work from Python 3.12 on.
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
    """Takes over what ``reader`` receives from now on. ``parser`` is nats-py's, whose ``parse`` the
    read loop calls, too. ``on_failure`` is called when parsing fails. ``spawn`` runs a coroutine as
    a task of the connection's owner."""

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
        # Earlier bytes are not read yet, or not parsed.
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
    """Run the rest of a coroutine that was begun by hand and now awaits ``waits_for``."""
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
