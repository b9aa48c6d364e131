"""A client that uses as little CPU as possible, since it may share the cores with the server.

Received bytes are timestamped at once and parsed after the last of them. Every request opens a
connection of its own: some servers close it after a stream, and a local connection is cheap.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import httpx
import msgspec

from pagemesh.cli.answers import UNDECODABLE, Event, Models, Refusal, Timings, Usage, refusal_of
from pagemesh.cli.benching.timed_stream import Pieces, events_of
from pagemesh.runtime.ports import shown_urls
from pagemesh.wire.errors import PagemeshError

GREEDY: Mapping[str, Any] = {"temperature": 0}
ANSWER_S_MAX = 1_800
"""Time limit of an answer, long enough for the slowest peer under many requests at once."""
_SHOWN_MAX = 300
"""Characters of a refusal that are quoted in the error."""


class RequestFailedError(PagemeshError):
    """The server refused, broke off, or returned another number of tokens than asked for."""


@dataclass(frozen=True, slots=True)
class Server:
    """An OpenAI-compatible server at ``url`` (without a path). ``key`` is its API key, ``tls`` the
    context to trust it by if the URL is https.

    A ``plain`` server accepts neither fields that OpenAI does not have nor token ids as a prompt:
    its prompts are text, and its model must never produce an end-of-sequence token.
    """

    name: str
    url: str
    model: str
    plain: bool = False
    key: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. Times are readings of one clock, in seconds; ``arrivals_s`` has one for each
    chunk with text. ``cached_tokens`` is None if the server does not report it."""

    sent_s: float
    arrivals_s: tuple[float, ...]
    ended_s: float
    text: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None

    @property
    def first_s(self) -> float:
        """Time to the first text. Requires a reply with text: tokens that form no whole character
        bring none."""
        return self.arrivals_s[0] - self.sent_s

    @property
    def token_s(self) -> float:
        """Mean time per token after the first. Requires a reply with text."""
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / max(1, self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between chunks with text, each of one or several tokens."""
        return [later - earlier for earlier, later in pairwise(self.arrivals_s)]


def find_server(name: str, url: str, *, plain: bool = False) -> Server:
    """Ask ``url`` for its model. Raises ``RequestFailedError`` when it names none."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        answer = httpx.get(f"{base}/v1/models", timeout=30.0).raise_for_status()
        model = (msgspec.json.decode(answer.content, type=Models).data or [])[0].id
    except (httpx.HTTPError, LookupError, *UNDECODABLE) as error:
        shown = shown_urls(base)
        why = str(error).replace(base, shown)
        raise RequestFailedError(f"{name} at {shown} names no model: {why}") from error
    return Server(name, base, model, plain)


def completion(
    server: Server, prompt: list[int] | str, output_tokens: int, draw: Mapping[str, Any]
) -> dict[str, Any]:
    """The request body for a completion of exactly ``output_tokens``; ``draw`` holds the API's
    sampling parameters."""
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "stream": True,
        **draw,
    }
    if not server.plain:
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    return body


async def complete(
    server: Server, prompt: list[int] | str, output_tokens: int, draw: Mapping[str, Any] = GREEDY
) -> Reply:
    """One streamed completion. Raises ``RequestFailedError``."""
    url = urlsplit(server.url)
    port = url.port or (443 if server.tls else 80)
    body = json.dumps(completion(server, prompt, output_tokens, draw)).encode()
    key = f"authorization: Bearer {server.key}\r\n" if server.key else ""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {url.netloc}\r\nconnection: close\r\n{key}"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    exchange = _Exchange(head.encode() + body, loop.create_future())
    try:
        transport, _ = await loop.create_connection(
            lambda: exchange, str(url.hostname), port, ssl=server.tls
        )
    except OSError as error:
        shown = shown_urls(server.url)
        raise RequestFailedError(f"{server.name} is not at {shown}: {error}") from error
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            ended_s = await exchange.ended
    except TimeoutError as error:
        told = f"{server.name}: no answer within {ANSWER_S_MAX // 60} minutes"
        raise RequestFailedError(told) from error
    finally:
        transport.close()
    if exchange.status != 200:
        said = _told(b"".join(data for _, data in exchange.pieces))
        raise RequestFailedError(f"{server.name}: status {exchange.status}: {said[:_SHOWN_MAX]}")
    try:
        reply = read_stream(exchange.pieces, exchange.sent_s, ended_s, output_tokens)
    except UNDECODABLE as error:
        raise RequestFailedError(f"{server.name}: no stream of completions: {error}") from error
    if reply.output_tokens != output_tokens:
        raise RequestFailedError(
            f"{server.name}: asked for {output_tokens} tokens, got {reply.output_tokens}"
        )
    return reply


def read_stream(pieces: Pieces, sent_s: float, ended_s: float, output_tokens: int) -> Reply:
    """Parse server-sent events; ``pieces`` are times and bytes, cut anywhere. Tokens that form no
    whole character bring no text, so the number of output tokens is taken from the usage. Without
    one it is ``output_tokens`` for an answer that ended by length, else the number of chunks with
    text. Raises ``RequestFailedError``, and those of ``UNDECODABLE`` for what is no stream."""
    arrivals: list[float] = []
    texts: list[str] = []
    usage, timings, finish = Usage(), Timings(), ""
    for at_s, fields in events_of(pieces):
        event = msgspec.convert(fields, Event)
        if event.error is not None:
            error = event.error
            said = error.message if isinstance(error, Refusal) else error
            raise RequestFailedError((said or "unknown error")[:_SHOWN_MAX])
        usage = event.usage or usage
        timings = event.timings or timings
        for choice in event.choices or ():
            finish = choice.finish_reason or finish
            if choice.text:
                arrivals.append(at_s)
                texts.append(choice.text)
    if not finish:
        raise RequestFailedError("the stream ended early")
    counted = output_tokens if finish == "length" else len(arrivals)
    cached, output = usage.cached_tokens, usage.completion_tokens
    return Reply(
        sent_s,
        tuple(arrivals),
        ended_s,
        "".join(texts),
        usage.prompt_tokens or 0,
        counted if output is None else output,
        timings.cache_n if cached is None else cached,
    )


def _told(body: bytes) -> str:
    """The message of an error in OpenAI's format, else the whole body."""
    refusal = refusal_of(body)
    return refusal.message if refusal and refusal.message else body.decode(errors="replace")


class _Exchange(asyncio.Protocol):
    """Sends a request once connected; ``ended`` resolves to the time its answer was complete."""

    def __init__(self, request: bytes, ended: asyncio.Future[float]) -> None:
        self.ended = ended
        self.sent_s = 0.0
        self.status = 0
        self.pieces: list[tuple[float, bytes]] = []
        self._request = request
        self._now_s = 0.0
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.sent_s = time.perf_counter()
        cast(asyncio.WriteTransport, transport).write(self._request)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was lost: {exc or 'closed'}")

    # Callbacks of the parser.

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.pieces.append((self._now_s, body))

    def on_message_complete(self) -> None:
        if not self.ended.done():
            self.ended.set_result(self._now_s)

    def _fail(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(RequestFailedError(reason))
