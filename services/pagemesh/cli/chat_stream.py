"""One answer of a chat: sends the request, reads its stream of events and times it.

The gateway streams lines ``data: {...}`` and ends with ``data: [DONE]``. A stream that ends without
``[DONE]`` was cut off, which is an error.
"""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from pagemesh.cli.client_config import ClientConfig
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
    wrong = f"PAGEMESH_URL={config.url!r} (--url) is not an http:// or https:// URL"
    if not config.url.startswith(("http://", "https://")):
        raise ConfigError(wrong)
    timeout = httpx.Timeout(_SILENCE_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
    url = config.url.rstrip("/").removesuffix("/v1")
    try:
        httpx.URL(url).host.encode("idna")  # connecting would, with an obscure error
        return httpx.Client(
            base_url=url, headers=headers, timeout=timeout, transport=transport,
            trust_env=False,  # no proxies
            verify=url.startswith("https:") and trusted(),
        )  # fmt: skip
    except (httpx.InvalidURL, ValueError):
        raise ConfigError(wrong) from None


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
            f"no mesh at {http.base_url}; start one with `pagemesh up`, or name another with --url "
            "or its pool folder with --pool-dir"
        ) from None
    except httpx.HTTPError as error:
        raise ChatError(f"{http.base_url}: {type(error).__name__}") from None
    models = answer_of(response).get("data", [])
    if not models:
        raise ChatError(f"{http.base_url} serves no model yet; wait until it is ready")
    name: str = models[0]["id"]
    return name


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
        f"TLS with {http.base_url} fails ({reason}); where it does not use TLS, give --url "
        "http://HOST:PORT; to trust a CA of your own, set SSL_CERT_FILE"
    )


def answer_of(response: httpx.Response) -> dict[str, Any]:
    """The JSON object that a gateway answered. Raises ``ChatError`` with the gateway's error, or if
    the answer is not a gateway's."""
    if response.is_error:
        raise _refusal(response)
    try:
        found = response.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ChatError(f"{response.url} answers no JSON object, {_NO_GATEWAY}")
    return found


def ask(http: httpx.Client, body: dict[str, Any], on_text: Callable[[str], None]) -> Answer:
    """Stream one chat completion; ``on_text`` gets each piece. ``max_tokens`` is an upper limit: if
    the context has less left, the answer gets that. Raises ``ChatError``, and ``NoRoom`` if nothing
    is left."""
    sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
    started = time.monotonic()
    text, finish, first_s = "", "", 0.0
    usage: dict[str, Any] = {}
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
            for event in events(response.iter_lines()):
                usage = event.get("usage") or usage
                for choice in event.get("choices", []):
                    piece = choice.get("delta", {}).get("content") or ""
                    finish = choice.get("finish_reason") or finish
                    if piece:
                        first_s = first_s or time.monotonic() - started
                        text += piece
                        on_text(piece)
    except httpx.HTTPError as error:
        raise ChatError(f"the stream broke off: {type(error).__name__}") from None
    total_s = time.monotonic() - started
    return Answer(
        text=text,
        finish=finish,
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
        first_token_s=first_s or total_s,
        total_s=total_s,
    )


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The events of a stream. Raises ``ChatError`` for an error event, a malformed event and an end
    without ``[DONE]``."""
    for line in lines:
        if not line.startswith("data:"):
            continue  # a blank line between events, or a comment that keeps the line open
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        if len(data) > _LINE_CHARACTERS_MAX:
            raise ChatError("the stream holds an event that is too long")
        try:
            event = json.loads(data)
        except json.JSONDecodeError:
            raise ChatError("the stream holds an event that is no JSON") from None
        if "error" in event:
            raise _told(event["error"], httpx.codes.OK)
        yield event
    raise ChatError("the stream ended before the answer did")


def _told(error: dict[str, Any], status: int) -> ChatError:
    # A quota used up by other requests for now (429) has nothing to do with this conversation.
    is_full = error.get("code") in _NO_ROOM and status != httpx.codes.TOO_MANY_REQUESTS
    return (NoRoom if is_full else ChatError)(error.get("message", "unknown error"))


def _refusal(response: httpx.Response) -> ChatError:
    try:
        error: dict[str, Any] = response.json()["error"]
        message: str = error["message"]
    except (ValueError, KeyError, TypeError):
        return ChatError(f"{response.url} answers status {response.status_code}, {_NO_GATEWAY}")
    if response.status_code == httpx.codes.UNAUTHORIZED:
        return ChatError(f"{message}; set PAGEMESH_API_KEY to a valid key")
    return _told(error, response.status_code)
