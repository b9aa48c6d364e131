"""Renders the events of a request as OpenAI's responses, whole and streamed. Pure.

response.created, response.in_progress          with the first of the others
those of its items                              see ``response_items``
response.completed | response.incomplete        the whole response
error, response.failed                          if it broke off
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from pagemesh.gateway.api.api_errors import ApiError
from pagemesh.gateway.api.openai_api import Ask
from pagemesh.gateway.api.render import ANSWER_BYTES_MAX, Collector, Renderer, sse
from pagemesh.gateway.api.response_items import Items
from pagemesh.gateway.calls.events import ChoiceEnded, Deliver
from pagemesh.gateway.calls.spec import Usage
from pagemesh.gateway.words.tokens import Tokens
from pagemesh.wire.tokens import U32

_TYPE = b'{"type":"'
"""How every event begins."""


def renderer_of(ask: Ask, tokens: Tokens, response_id: str, clock: Callable[[], float]) -> Renderer:
    """Of the endpoint that was asked. ``clock`` gives seconds since 1970."""
    if ask.repeated is not None:
        return ResponseRenderer(ask, tokens, response_id=response_id, clock=clock)
    return Renderer(ask, tokens, response_id=response_id, created=int(clock()))


class ResponseRenderer(Renderer):
    """The JSON of one response."""

    def __init__(
        self, ask: Ask, tokens: Tokens, *, response_id: str, clock: Callable[[], float]
    ) -> None:
        self._created = int(clock())
        super().__init__(ask, tokens, response_id=response_id, created=self._created)
        self._clock = clock
        self._response_id = response_id
        self._items = Items(ask, tokens, response_id)
        self._sequence = 0

    # One response -----------------------------------------------------------------------------

    def collect(self, prompts: list[U32], bytes_max: int = ANSWER_BYTES_MAX) -> Collector:
        items = Items(self._ask, self._tokens, self._response_id, bytes_max)
        self._items = items
        return _ItemCollector(self._ask, self._tokens, items)

    def response(self, collected: Collector, prompts: list[U32], usage: Usage) -> bytes:
        for _ in self._items.close():
            pass
        return msgspec.json.encode(self._ended_response(usage))

    # Events -----------------------------------------------------------------------------------

    def opening(self, prompts: list[U32]) -> list[bytes]:
        begun = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return self._encoded({"type": kind, "response": begun} for kind in kinds)

    def chunks_of(self, prompt_index: int, event: Deliver | ChoiceEnded) -> list[bytes]:
        if isinstance(event, ChoiceEnded):
            return self._encoded(self._items.ended(event))
        return self._encoded(self._items.delivered(event))

    @property
    def kept_bytes(self) -> int:
        return self._items.size_bytes

    def last(self, usage: Usage) -> list[bytes]:
        chunks = self._encoded(self._items.close())
        whole = self._ended_response(usage)
        return chunks + self._encoded([{"type": f"response.{whole['status']}", "response": whole}])

    def failed(self, error: ApiError) -> list[bytes]:
        told: dict[str, Any] = msgspec.json.decode(error.body())
        said = {name: told["error"][name] for name in ("code", "message", "param")}
        why = {"code": "server_error", "message": error.message}
        if error.status == 429:
            why["code"] = "rate_limit_exceeded"
        # OpenAI's own library raises what has an ``error`` in it.
        return self._encoded(
            [
                {"type": "error", **said, **told},
                {"type": "response.failed", "response": self._response("failed", error=why)},
            ]
        )

    def _encoded(self, events: Iterable[dict[str, Any]]) -> list[bytes]:
        out: list[bytes] = []
        for event in events:
            out.append(msgspec.json.encode({**event, "sequence_number": self._sequence}))
            self._sequence += 1
        return out

    def _ended_response(self, usage: Usage) -> dict[str, Any]:
        told: dict[str, Any] = {"output": self._items.json(), "usage": _usage_json(usage)}
        if self._items.finish == "length":
            cut = {"reason": "max_output_tokens"}
            return self._response("incomplete", incomplete_details=cut, **told)
        return self._response("completed", completed_at=int(self._clock()), **told)

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        ask = self._ask
        body: dict[str, Any] = {
            "id": self._response_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "frequency_penalty": ask.frequency_penalty,
            "incomplete_details": None,
            "max_tool_calls": None,
            "model": ask.model,
            "output": [],
            "presence_penalty": ask.presence_penalty,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        return body | {**(ask.repeated or {})} | more


class _ItemCollector(Collector):
    """Gathers the items of a response that is answered in one piece."""

    def __init__(self, ask: Ask, tokens: Tokens, items: Items) -> None:
        super().__init__(ask, tokens.written)
        self._items = items

    def delivered(self, prompt_index: int, event: Deliver) -> None:
        for _ in self._items.delivered(event):
            pass
        self.size_bytes = self._items.size_bytes

    def ended(self, prompt_index: int, event: ChoiceEnded) -> None:
        for _ in self._items.ended(event):
            pass
        self.size_bytes = self._items.size_bytes


def _usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def named_sse(event: bytes) -> bytes:
    """One server-sent event that has the name of its type."""
    name = event[len(_TYPE) : event.index(b'"', len(_TYPE))]
    return b"event: %b\n%b" % (name, sse(event))
