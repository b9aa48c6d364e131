"""What a socket has is parsed at once, and in its order, whatever a parse has to wait for."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from structlog.testing import capture_logs

from pagemesh.runtime.bus.link import Link
from pagemesh.runtime.bus.straight import StraightReader
from pagemesh.runtime.settings import BusConfig


class Parser:
    """Notes what it is given; waits in the middle of what ``waits`` names, for ``go_on``."""

    def __init__(self, waits: bytes = b"nothing") -> None:
        self.begun: list[bytes] = []
        self.ended: list[bytes] = []
        self.waits = waits
        self.go_on: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def parse(self, data: bytes) -> None:
        self.begun.append(data)
        if data == b"broken":
            raise ValueError("broken")
        if data == self.waits:
            await self.go_on
            await asyncio.sleep(0)
        self.ended.append(data)


async def _not_wanted(error: Exception) -> None:
    raise AssertionError(error)


async def _read_loop(reader: asyncio.StreamReader, parser: Parser) -> None:
    """As nats-py reads."""
    while not reader.at_eof():
        await parser.parse(await reader.read(1_000))


async def _turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_what_comes_is_parsed_before_anybody_else_has_a_turn() -> None:
    reader, parser = asyncio.StreamReader(), Parser()
    StraightReader(reader, parser, _not_wanted, asyncio.ensure_future)
    reader.feed_data(b"one")
    reader.feed_data(b"two")
    assert parser.ended == [b"one", b"two"]


async def test_what_came_before_is_the_read_loops_and_what_follows_comes_after_it() -> None:
    reader, parser = asyncio.StreamReader(), Parser()
    reader.feed_data(b"one")
    loop = asyncio.create_task(_read_loop(reader, parser))
    StraightReader(reader, parser, _not_wanted, asyncio.ensure_future)
    reader.feed_data(b" two")
    assert not parser.begun
    await _turns()
    assert parser.ended == [b"one two"]
    reader.feed_data(b"three")
    assert parser.ended == [b"one two", b"three"]
    reader.feed_eof()
    await loop


@pytest.mark.parametrize("by_loop", [False, True])
async def test_what_comes_while_a_parse_waits_is_parsed_in_its_turn(by_loop: bool) -> None:
    reader, parser = asyncio.StreamReader(), Parser(waits=b"one")
    if by_loop:
        reader.feed_data(b"one")
    StraightReader(reader, parser, _not_wanted, asyncio.ensure_future)
    loop = asyncio.create_task(_read_loop(reader, parser))
    if not by_loop:
        reader.feed_data(b"one")
    await _turns()
    reader.feed_data(b"two")
    reader.feed_data(b"three")
    await _turns()
    assert parser.begun == [b"one"]
    parser.go_on.set_result(None)
    reader.feed_data(b"four")
    await _turns(20)
    assert parser.ended[0] == b"one" and b"".join(parser.ended) == b"onetwothreefour"
    reader.feed_data(b"five")
    assert parser.ended[-1] == b"five"
    reader.feed_eof()
    await loop


async def test_what_a_parse_waits_for_may_fail() -> None:
    reader, parser = asyncio.StreamReader(), Parser(waits=b"one")
    failed: list[Exception] = []

    async def on_failure(error: Exception) -> None:
        failed.append(error)

    StraightReader(reader, parser, on_failure, asyncio.ensure_future)
    reader.feed_data(b"one")
    parser.go_on.set_exception(OSError("gone"))
    await _turns()
    assert [str(error) for error in failed] == ["gone"]


async def test_what_cannot_be_parsed_is_told() -> None:
    reader, parser = asyncio.StreamReader(), Parser()
    told: list[Exception] = []

    async def on_failure(error: Exception) -> None:
        await asyncio.sleep(0)  # closing takes a while
        told.append(error)

    StraightReader(reader, parser, on_failure, asyncio.ensure_future)
    with capture_logs() as logs:
        reader.feed_data(b"broken")
    await _turns()
    assert len(told) == 1 and isinstance(told[0], ValueError)
    assert [(one["event"], one["error"]) for one in logs] == [("bus.parse_crashed", told[0])]


async def test_what_comes_while_a_parse_waits_is_bounded_by_the_stream() -> None:
    """Each piece had a task of its own, as many as there were."""
    made: list[asyncio.Task[None]] = []

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        made.append(asyncio.get_running_loop().create_task(work))

    reader, parser = asyncio.StreamReader(limit=100), Parser(waits=b"one")
    transport = Pausing()
    reader.set_transport(transport)
    StraightReader(reader, parser, _not_wanted, spawn)
    loop = asyncio.create_task(_read_loop(reader, parser))
    reader.feed_data(b"one")
    await _turns()
    while not transport.is_paused:
        reader.feed_data(b"x" * 50)
        await asyncio.sleep(0)
    assert len(made) == 1 and parser.begun == [b"one"]
    parser.go_on.set_result(None)
    await _turns(20)
    assert not transport.is_paused and len(b"".join(parser.ended)) > 200
    reader.feed_eof()
    await loop


async def test_a_ping_on_a_closed_transport_ends_the_link() -> None:
    """uvloop raises what is no OSError, and nobody heard of it."""

    class Closed:
        async def rtt(self, **_options: object) -> float:
            raise RuntimeError("the handler is closed")

    link = Link(Closed(), BusConfig())  # type: ignore[arg-type]
    await link._ping()
    assert link.lost.is_set() and link.reason == "the handler is closed"


class Pausing(asyncio.Transport):
    is_paused = False

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False
