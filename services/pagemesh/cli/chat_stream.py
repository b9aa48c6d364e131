"""One answer of a chat: sends the request, reads its stream of events and times it.

The gateway streams lines ``data: {...}`` and ends with ``data: [DONE]``. A stream that ends without
``[DONE]`` was cut off, which is an error.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from pagemesh.cli.answers import UNDECODABLE, Event, Models, Refusal, S, Usage, refusal_of
from pagemesh.cli.client_config import ClientConfig
from pagemesh.runtime.ports import is_url, shown_urls
from pagemesh.wire.errors import ConfigError, PagemeshError

_CONNECT_TIMEOUT_S = 5.0
_SILENCE_TIMEOUT_S = 120.0
_LINE_CHARACTERS_MAX = 1 << 20
_NO_ROOM = frozenset({"context_length_exceeded", "quota_exceeded"})
_NO_GATEWAY = "which is no answer of a gateway; name it with --url"
_RATE_S_MIN = 0.1
"""Tokens arrive several at a time, so a shorter span says nothing about their rate."""
Message = dict[str, str]


class ChatError(PagemeshError):
    """The mesh refused the request or broke off the answer; the message is the mesh's."""


class NoRoom(ChatError):
    """The conversation, with or without its answer, exceeds the context or the quota."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with its token counts and times, in seconds since the request was sent."""

    text: str
    finish: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_s: float
    total_s: float

    @property
    def facts(self) -> str:
        """One line for the user."""
        rate = ""
        rest_s = self.total_s - self.first_token_s
        if self.completion_tokens > 1 and rest_s >= _RATE_S_MIN:
            rate = f" ({(self.completion_tokens - 1) / rest_s:.0f}/s)"
        return (
            f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens cached"
            f" | first token {self.first_token_s * 1_000:.0f} ms"
            f" | {self.completion_tokens} tokens in {self.total_s:.2f} s{rate}"
            + (f" | stopped by {self.finish}" if self.finish not in ("", "stop") else "")
        )


def client(config: ClientConfig, transport: httpx.BaseTransport | None = None) -> httpx.Client:
    """An HTTP client for the gateway, whose URL may end in ``/v1`` as SDKs want it. Raises
    ``ConfigError`` for an invalid URL or API key."""
    headers = {}
    if config.api_key.is_set:
        headers["Authorization"] = f"Bearer {config.api_key.reveal()}"
        if not config.api_key.reveal().isprintable() or not config.api_key.reveal().isascii():
            raise ConfigError("PAGEMESH_API_KEY holds what no key has: keys are printable ASCII")
    timeout = httpx.Timeout(_SILENCE_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
    url = _gateway_url(config.url)
    return httpx.Client(
        base_url=url, headers=headers, timeout=timeout, transport=transport,
        trust_env=False,  # no proxies
        verify=url.scheme == "https" and trusted(),
    )  # fmt: skip


def _gateway_url(text: str) -> httpx.URL:
    shown = f"PAGEMESH_URL={shown_urls(text)!r} (--url)"
    if "?" in text or "#" in text:
        raise ConfigError(f"{shown} has a query or a fragment; end it before the ? or #")
    try:
        url = httpx.URL(text.rstrip("/").removesuffix("/v1"))
        url.host.encode("idna")  # connecting would, with an obscure error
    except (httpx.InvalidURL, ValueError):
        url = httpx.URL()
    if not (is_url(text, ("http", "https")) and url.is_absolute_url):
        raise ConfigError(f"{shown} is not an http:// or https:// URL such as {ClientConfig().url}")
    return url


def place(http: httpx.Client) -> str:
    """The gateway's URL for messages: without password and final slash."""
    return shown_urls(str(http.base_url)).rstrip("/")


def trusted() -> ssl.SSLContext:
    """The TLS context with the CAs that the environment names. Raises ``ConfigError``."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        from pagemesh.runtime.bus.tls import unusable  # the bus takes long to import

        raise unusable("SSL_CERT_FILE", os.environ.get("SSL_CERT_FILE", ""), error) from None


def served_model(http: httpx.Client) -> str:
    """The name of the model that is served. Raises ``ConfigError`` when nothing answers there, and
    ``ChatError`` when no model is served."""
    try:
        response = http.get("/v1/models")
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
        raise tls_failure(http, error) or ConfigError(
            f"no mesh at {place(http)}; start one with `pagemesh up`, or name another with --url "
            "or its pool folder with --pool-dir"
        ) from None
    except httpx.HTTPError as error:
        raise ChatError(f"{place(http)}: {type(error).__name__}") from None
    models = answer_of(response, Models).data
    if not models:
        raise ChatError(f"{place(http)} serves no model yet; wait until it is ready")
    return models[0].id


def tls_failure(http: httpx.Client, error: httpx.HTTPError) -> ConfigError | None:
    """The error to report if ``error`` was caused by TLS: the server does not speak it, or we do
    not trust its certificate. None for any other cause."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    reason = (cause.reason or "no reason given").replace("_", " ").lower()
    return ConfigError(
        f"TLS with {place(http)} fails ({reason}); where it does not use TLS, give --url "
        "http://HOST:PORT; to trust a CA of your own, set SSL_CERT_FILE"
    )


def answer_of(response: httpx.Response, kind: type[S]) -> S:
    """What a gateway answered. Raises ``ChatError`` with the gateway's error, or if the answer is
    not a gateway's."""
    if response.is_error:
        raise _refusal(response)
    try:
        found = msgspec.json.decode(response.content, type=dict[str, Any])
    except UNDECODABLE:
        raise _strange(response, "answers no JSON object") from None
    try:
        return msgspec.convert(found, kind)
    except UNDECODABLE:
        raise _strange(response, "answers other JSON") from None


def ask(http: httpx.Client, body: dict[str, Any], on_text: Callable[[str], None]) -> Answer:
    """Stream one chat completion; ``on_text`` gets each piece. ``max_tokens`` is an upper limit: if
    the context has less left, the answer gets that. Raises ``ChatError``, and ``NoRoom`` if nothing
    is left."""
    sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
    started = time.monotonic()
    text, finish, first_s = "", "", 0.0
    usage = Usage()
    try:
        with http.stream("POST", "/v1/chat/completions", json=sent) as response:
            if response.is_error:
                response.read()
                refused = _refusal(response)
                if isinstance(refused, NoRoom) and "max_tokens" in body:
                    # Without max_tokens, an answer may use what is left.
                    rest = {name: value for name, value in body.items() if name != "max_tokens"}
                    return ask(http, rest, on_text)
                raise refused
            for fields in events(_lines(response.iter_text())):
                event = _event(response, fields)
                usage = event.usage or usage
                for choice in event.choices or ():
                    finish = choice.finish_reason or finish
                    if choice.delta and (piece := choice.delta.content):
                        first_s = first_s or time.monotonic() - started
                        text += piece
                        on_text(piece)
    except httpx.HTTPError as error:
        raise ChatError(f"the stream broke off: {type(error).__name__}") from None
    total_s = time.monotonic() - started
    return Answer(
        text=text,
        finish=finish,
        prompt_tokens=usage.prompt_tokens or 0,
        cached_tokens=usage.cached_tokens or 0,
        completion_tokens=usage.completion_tokens or 0,
        first_token_s=first_s or total_s,
        total_s=total_s,
    )


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The events of a stream. Raises ``ChatError`` for a malformed event and an end without
    ``[DONE]``."""
    for line in lines:
        if not line.startswith("data:"):
            continue  # a blank line between events, or a comment that keeps the line open
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = msgspec.json.decode(data, type=dict[str, Any])
        except UNDECODABLE:
            raise ChatError("the stream holds an event that is no JSON object") from None
        yield event
    raise ChatError("the stream ended before the answer did")


def _lines(pieces: Iterator[str]) -> Iterator[str]:
    """Lines end at line feeds alone: httpx's also end at separators that JSON strings may hold."""
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        yield from lines
        if len(rest) > _LINE_CHARACTERS_MAX:
            raise ChatError("the stream holds an event that is too long")
    yield rest


def _event(response: httpx.Response, fields: dict[str, Any]) -> Event:
    """Raises ``ChatError`` for an error and for what is no event of a chat."""
    try:
        event = msgspec.convert(fields, Event)
    except UNDECODABLE:
        raise _strange(response, "streams other JSON") from None
    if isinstance(event.error, str):
        raise ChatError(event.error)
    if event.error is not None:
        raise _told(event.error, httpx.codes.OK)
    return event


def _told(error: Refusal, status: int) -> ChatError:
    # A quota used up by other requests for now (429) has nothing to do with this conversation.
    is_full = str(error.code) in _NO_ROOM and status != httpx.codes.TOO_MANY_REQUESTS
    return (NoRoom if is_full else ChatError)(error.message or "unknown error")


def _refusal(response: httpx.Response) -> ChatError:
    error = refusal_of(response.content)
    if error is None:
        return _strange(response, f"answers status {response.status_code}")
    if response.status_code == httpx.codes.UNAUTHORIZED:
        return ChatError(f"{error.message}; set PAGEMESH_API_KEY to a valid key")
    return _told(error, response.status_code)


def _strange(response: httpx.Response, does: str) -> ChatError:
    return ChatError(f"{shown_urls(str(response.url))} {does}, {_NO_GATEWAY}")
