"""What a request core says to workers."""

from __future__ import annotations

from collections.abc import Iterable

from pagemesh.gateway.choice import Choice
from pagemesh.gateway.events import Route
from pagemesh.gateway.spec import RequestSpec
from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.tokens import pack
from pagemesh.wire.work_messages import Abort, AbortReason, ChoiceStart, Resend, Submit


def submit(
    spec: RequestSpec,
    route: Route,
    group: Iterable[Choice],
    attempt: int,
    deadline_ms: int,
    *,
    scored: bool,
) -> Submit:
    """The ``Submit`` of ``group``, with what their client already has. ``scored``: prompt
    log-probabilities are not wanted (any more)."""
    return Submit(
        request=spec.request,
        attempt=attempt,
        gateway=spec.gateway,
        gateway_incarnation=spec.gateway_incarnation,
        priority=spec.priority,
        arrival_us=spec.arrival_us,
        root=route.root,
        prompt=pack(spec.prompt),
        choices=[ChoiceStart(choice=c.index, generated=bytes(c.generated)) for c in group],
        sampling=spec.sampling,
        prompt_logprobs=not scored,
        read_cache=spec.read_cache,
        terms=spec.terms,
        decode=route.decode.name if route.decode else None,
        deadline_ms=deadline_ms,
    )


def resend(spec: RequestSpec, choice: Choice) -> Resend:
    """Ask for everything from the next wanted position on."""
    key = SequenceKey(request=spec.request, attempt=choice.attempt, choice=choice.index)
    return Resend(key=key, position=choice.token_count)


def abort(spec: RequestSpec, choice: Choice, reason: AbortReason, whole: int | None) -> Abort:
    """Stop ``choice``, or every choice of each attempt up to ``whole``."""
    return Abort(
        request=spec.request,
        attempt=choice.attempt if whole is None else whole,
        choice=choice.index if whole is None else None,
        reason=reason,
    )
