"""The facts of a call for its span and the metrics: gathered as it runs, recorded at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from pagemesh.gateway import measures
from pagemesh.gateway.api.api_errors import ApiError, ClientLeft, from_fault
from pagemesh.gateway.api.openai_api import Ask
from pagemesh.gateway.calls.events import Deliver
from pagemesh.gateway.calls.request import RequestCore
from pagemesh.runtime import semconv
from pagemesh.runtime.ids import new_request_id
from pagemesh.runtime.spans import Attribute, record_span
from pagemesh.runtime.trace import TraceContext
from pagemesh.wire.errors import Fault


def endpoint_of(*, chat: bool) -> str:
    return "chat" if chat else "text_completion"


def _id_prefix(ask: Ask) -> str:
    if ask.repeated is not None:
        return "resp_"
    return "chatcmpl-" if ask.chat else "cmpl-"


def outcome_of(error: BaseException) -> str:
    """``cancelled``: the client left, or read too slowly. ``refused``: the request itself is at
    fault, or its tenant is at a limit of its own. Otherwise ``failed``; that includes 403, where
    the gateway itself lacks a permission."""
    if isinstance(error, ClientLeft) or not isinstance(error, Exception):
        return "cancelled"  # not an ``Exception``: the task was cancelled
    told = _told(error)
    if told is not None and told.code in ("cancelled", "slow_reader"):
        return "cancelled"
    if told is None or told.status >= 500 or told.status == 403:
        return "failed"
    return "refused" if told.status != 429 or told.code == "quota_exceeded" else "failed"


def _told(error: Exception) -> ApiError | None:
    """The error as the client is told it; None for a bug."""
    if isinstance(error, Fault):
        return from_fault(error)
    return error if isinstance(error, ApiError) else None


@contextlib.contextmanager
def ends_counted(door: str, *, chat: bool) -> Iterator[None]:
    """Counts a request that fails within the context, since it never becomes a call."""
    try:
        yield
    except BaseException as error:
        measures.requests.labels(door, endpoint_of(chat=chat), outcome_of(error)).inc()
        raise


class CallFacts:
    """Make one when the call begins and ``close`` it when it ends."""

    def __init__(self, ask: Ask, door: str, context: TraceContext, start_us: int) -> None:
        self.finish_reasons: list[str] = []
        self.response_id = _id_prefix(ask) + new_request_id()
        self._ask = ask
        self._door = door
        self._context = context
        self._start_us = start_us
        self._first_us = 0
        self._last_us = 0
        self._error = ""
        self._ended = ""

    @property
    def endpoint(self) -> str:
        return endpoint_of(chat=self._ask.chat)

    def delivered(self, event: Deliver, now_us: int) -> None:
        """Note when the first and the last tokens are delivered."""
        if len(event.tokens):
            self._first_us = self._first_us or now_us
            self._last_us = now_us

    def failed(self, error: Exception) -> None:
        """The call ended with ``error``."""
        if isinstance(error, ClientLeft):
            return  # possibly after the whole answer: ``close`` decides
        self._ended = outcome_of(error)
        told = _told(error)
        self._error = "internal" if told is None else told.code or told.type

    def close(self, cores: Sequence[RequestCore], now_us: int) -> None:
        """Record the span and the metrics."""
        usages = [core.usage for core in cores]
        prompt = sum(usage.prompt_tokens for usage in usages)
        output = sum(usage.completion_tokens for usage in usages)
        cached = sum(usage.cached_tokens for usage in usages)
        choices = len(self._ask.prompts) * self._ask.best_of
        whole = len(self.finish_reasons) == choices
        outcome = self._ended or ("completed" if whole else "cancelled")
        measures.requests.labels(self._door, self.endpoint, outcome).inc()
        measures.prompt_tokens.inc(prompt)
        measures.output_tokens.inc(output)
        measures.cached_tokens.inc(cached)
        measures.elsewhere_tokens.inc(sum(core.elsewhere_tokens for core in cores))
        if whole:
            measures.request_seconds.labels(self.endpoint).observe((now_us - self._start_us) / 1e6)
        if self._first_us:
            first_us = self._first_us - self._start_us
            measures.first_token_seconds.labels(self.endpoint).observe(first_us / 1e6)
        steps = output - choices
        if whole and steps > 0 and self._ask.beams is None:  # a search delivers all at once
            each_us = (self._last_us - self._first_us) * choices / steps
            measures.token_seconds.labels(self.endpoint).observe(each_us / 1e6)
        attributes = self._request_attributes()
        attributes |= {
            semconv.GEN_AI_USAGE_INPUT_TOKENS: prompt,
            semconv.GEN_AI_USAGE_OUTPUT_TOKENS: output,
            semconv.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: cached,
            semconv.GEN_AI_RESPONSE_FINISH_REASONS: self.finish_reasons,
            "pagemesh.outcome": outcome,
        }
        attributes |= _waterfall(cores)
        record_span(
            f"{self.endpoint} {self._ask.model}",
            self._context,
            start_us=self._start_us,
            end_us=now_us,
            attributes=attributes,
            kind="server",
            error=self._error or ("cancelled" if outcome == "cancelled" else ""),
        )

    def _request_attributes(self) -> dict[str, Attribute]:
        ask = self._ask
        found: dict[str, Attribute] = {
            semconv.GEN_AI_OPERATION_NAME: self.endpoint,
            semconv.GEN_AI_PROVIDER_NAME: semconv.GEN_AI_PROVIDER,
            semconv.GEN_AI_REQUEST_MODEL: ask.model,
            semconv.GEN_AI_RESPONSE_MODEL: ask.model,
            semconv.GEN_AI_RESPONSE_ID: self.response_id,
            semconv.GEN_AI_REQUEST_TEMPERATURE: ask.temperature,
            semconv.GEN_AI_REQUEST_TOP_P: ask.top_p,
            semconv.GEN_AI_REQUEST_TOP_K: ask.top_k,
            semconv.GEN_AI_REQUEST_CHOICE_COUNT: ask.n,
            semconv.GEN_AI_REQUEST_STREAM: ask.stream,
            "pagemesh.door": self._door,
        }
        if ask.max_tokens is not None:
            found[semconv.GEN_AI_REQUEST_MAX_TOKENS] = ask.max_tokens
        if ask.selects:
            found["pagemesh.best_of"] = ask.best_of
        if ask.beams is not None:
            found["pagemesh.beam.width"] = ask.beams.width
        if ask.seed is not None:
            found[semconv.GEN_AI_REQUEST_SEED] = ask.seed
        if ask.stops:
            found["pagemesh.stop.count"] = len(ask.stops)
        if self._first_us:
            first_s = (self._first_us - self._start_us) / 1e6
            found[semconv.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] = first_s
        if ask.label:
            found["pagemesh.client_request_id"] = ask.label
        return found


def _waterfall(cores: Sequence[RequestCore]) -> dict[str, Attribute]:
    """What became of each cached token, as the first choice of each prompt reports it."""
    found: dict[str, Attribute] = {}
    if not cores:
        return found
    found[semconv.PAGEMESH_REQUEST] = cores[0].spec.request
    found[semconv.PAGEMESH_ATTEMPT] = max(core.attempt_count for core in cores)
    told = [choice for core in cores for choice in core.choices[:1]]
    falls = [choice.waterfall for choice in told if choice.waterfall is not None]
    elsewhere = sum(core.elsewhere_tokens for core in cores)
    if elsewhere:
        found[f"{semconv.PAGEMESH_TOKENS_LOST}.elsewhere"] = elsewhere
    if falls:
        found[semconv.PAGEMESH_TOKENS_AVAILABLE] = sum(fall.available_tokens for fall in falls)
        found[semconv.PAGEMESH_TOKENS_SELECTED] = sum(fall.selected_tokens for fall in falls)
        found[semconv.PAGEMESH_TOKENS_DELIVERED] = sum(fall.delivered_tokens for fall in falls)
        found[semconv.PAGEMESH_TOKENS_COMPUTED] = sum(choice.computed_tokens for choice in told)
        for fall in falls:
            for reason, count in list(fall.lost.items())[:16]:
                name = f"{semconv.PAGEMESH_TOKENS_LOST}.{reason[:64]}"
                before = found.get(name, 0)
                found[name] = count + (before if isinstance(before, int) else 0)
    return found
