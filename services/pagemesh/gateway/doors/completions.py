"""The HTTP paths that answer: chat completions, completions and responses."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagemesh.gateway.api.api_errors import ApiError
from pagemesh.gateway.api.openai_api import Ask, parse_chat, parse_completion
from pagemesh.gateway.api.render import DONE, sse
from pagemesh.gateway.api.response_body import own_names, parse_response
from pagemesh.gateway.api.response_render import named_sse
from pagemesh.gateway.calls.call_facts import ends_counted
from pagemesh.gateway.doors.asgi import (
    headers_of,
    read_body,
    send_json,
    start,
    while_connected,
    write,
)
from pagemesh.gateway.doors.front import Call, Caller, Front
from pagemesh.gateway.doors.idempotency import HEADER, IdempotencyStore

_DOOR = "http"
_SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


@dataclass(frozen=True, slots=True)
class Form:
    """What an endpoint takes and gives."""

    parser: Callable[..., Ask]
    chat: bool = True
    """Whether it counts as a chat."""
    event: Callable[[bytes], bytes] = sse
    """Makes an event of a chunk."""
    end: bytes = DONE
    """What a whole stream ends with."""
    names: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """Within it, errors after parsing have the endpoint's own names of parameters."""


CHATS = Form(parse_chat)
COMPLETIONS = Form(parse_completion, chat=False)
RESPONSES = Form(parse_response, event=named_sse, end=b"", names=own_names)
NOT_KEPT_PATH = "/v1/responses/{rest:path}"


async def not_kept(_request: Request) -> Response:
    """Answers for what OpenAI does with a response that it has kept."""
    text = (
        "no response is kept here: POST /v1/responses with the whole conversation as input, or "
        "/tokenize to count its tokens"
    )
    raise ApiError(404, text, code="not_found")


class Completions:
    """``/v1/chat/completions``, ``/v1/completions`` or ``/v1/responses``, as ``form`` says."""

    def __init__(
        self, front: Front, store: IdempotencyStore, form: Form, *, body_bytes_max: int
    ) -> None:
        self._front = front
        self._store = store
        self._form = form
        self._chat = form.chat
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._front.asked(scope["pagemesh.tenant"], _DOOR, chat=self._chat):
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ends_counted(_DOOR, chat=self._chat):
            body = await read_body(scope, receive, bytes_max=self._body_bytes_max)
        headers = headers_of(scope)
        tenant = scope["pagemesh.tenant"]
        caller = Caller(door=_DOOR, tenant=tenant, headers=headers)
        key = headers.get(HEADER)
        if key is None:
            await while_connected(receive, lambda: self._answer(body, caller, send))
            return
        digest = hashlib.sha256(scope["path"].encode() + b"\0" + body).digest()
        now_ms = self._front.gateway.clock.now_ms()
        with ends_counted(_DOOR, chat=self._chat):
            known = self._store.begin(tenant, key, digest, now_ms)
        if known is not None:
            await send_json(send, known, headers={"idempotent-replayed": "true"})
            return
        try:
            await while_connected(receive, lambda: self._answer(body, caller, send, key))
        finally:
            self._store.abandon(tenant, key)

    async def _answer(self, body: bytes, caller: Caller, send: Send, key: str = "") -> None:
        answer: bytes | None = None
        parser = self._form.parser
        parsed = await self._front.parse(body, caller, chat=self._chat, parser=parser)
        with self._form.names():
            understood = await self._front.understand(parsed, caller)
            async with self._front.call(understood, caller) as call:
                if understood.ask.stream:
                    await self._stream(call, send)
                else:
                    answer = await call.whole()
                    await send_json(send, answer)
        if key:
            self._store.finish(caller.tenant, key, answer)

    async def _stream(self, call: Call, send: Send) -> None:
        """Server-sent events. The status goes out with the first of them, so an earlier failure is
        a plain error response; a later one is an error event, and the end of the stream."""
        started, event = False, self._form.event
        try:
            async for chunks in call.chunks():
                if not started:
                    started = True
                    await start(send, 200, _SSE_HEADERS)
                await write(send, b"".join([event(chunk) for chunk in chunks]), more=True)
            await write(send, self._form.end, more=False)
        except ApiError as error:
            if not started:
                raise
            await write(send, b"".join(map(event, call.failed(error))), more=False)
            raise
