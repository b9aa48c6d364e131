"""A validated request, and the limits on its retries and waits. Plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagemesh.gateway.calls.choice import Choice
from pagemesh.wire.cache_terms import NO_TERMS, CacheTerms
from pagemesh.wire.errors import Busy, Fault, Gone, Internal, Stale, Superseded
from pagemesh.wire.messages import REQUEST_TOKENS_MAX
from pagemesh.wire.tokens import U32
from pagemesh.wire.work_messages import Sampling

ATTEMPT_MAX = 1000
"""The wire's own bound on the attempt number."""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What was asked for, validated. ``own_stops`` are the client's stop tokens, as opposed
    to the model's end tokens; ``show_stop``: text includes the stop that ended it."""

    request: str
    gateway: str
    gateway_incarnation: int
    priority: int
    arrival_us: int
    prompt: U32
    choice_count: int
    sampling: Sampling
    deadline_ms: int
    """On the caller's clock, from which ``now_ms`` is read."""
    prompt_logprobs: bool = False
    read_cache: bool = True
    terms: CacheTerms = NO_TERMS
    submit_tokens_max: int = REQUEST_TOKENS_MAX
    """What one ``Submit`` can carry: the prompt, and the tokens its choices already have."""
    own_stops: frozenset[int] = frozenset()
    show_stop: bool = False

    @property
    def sequence_count(self) -> int:
        """Sequences asked of workers: a beam search is one, however many choices it returns."""
        return self.choice_count if self.sampling.beams is None else 1

    @property
    def width(self) -> int:
        """Rows of a step that each of these sequences takes."""
        return 1 if self.sampling.beams is None else self.sampling.beams.width


@dataclass(frozen=True, slots=True)
class RequestLimits:
    failures_max: int = 8
    """Failed attempts of a choice in a row, without a new token between them."""
    backoff_ms: int = 25
    backoff_ms_max: int = 1_000
    submit_timeout_ms: int = 5_000
    resend_timeout_ms: int = 2_000
    silence_ms_max: int = 1_000
    """After this long without a frame, workers are asked whether they still know the choice."""
    gap_patience_ms: int = 500
    resends_max: int = 8
    worker_wait_ms_max: int = 3_000
    """How long a new request waits for a worker to appear, when none is expected: long enough
    to see one that has just registered, short enough for a client to go elsewhere."""
    recovery_wait_ms_max: int = 30_000
    """The same for a request that already had a worker, or when one is probably on its way back
    (``routing.returning``)."""
    version_wait_ms_max: int = 1_000
    """The same when the weights that the request began with are no longer served. A choice may
    still be thought to run on them; once none is, and if nothing was delivered, any weights will
    do."""

    def wait_ms_max(self, reason: Fault, *, patient: bool) -> int:
        """How long a request waits for a worker when none can take it for ``reason``."""
        if isinstance(reason, Superseded):
            return self.version_wait_ms_max
        return self.recovery_wait_ms_max if patient else self.worker_wait_ms_max


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, spec: RequestSpec, choices: Sequence[Choice]) -> Usage:
        """The usage of ``choices`` so far."""
        prompt_count = len(spec.prompt)
        cached = next((c.waterfall.delivered_tokens for c in choices if c.waterfall), 0)
        used = sum(choice.used_count for choice in choices)
        return cls(prompt_count, used, min(cached, prompt_count))


def mendable(error: Fault) -> bool:
    """Whether another attempt may succeed."""
    return isinstance(error, Busy | Stale | Gone | Internal) or error.retry_after_ms > 0
