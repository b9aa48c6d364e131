"""Builds what a request core sends to workers, and its questions to router and pager."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pagemesh.gateway.calls.choice import Choice
from pagemesh.gateway.calls.events import AskPages, ChooseRoute, Route, SendSubmit, Worker
from pagemesh.gateway.calls.spec import RequestSpec
from pagemesh.wire.messages import Order, SequenceKey
from pagemesh.wire.pager_messages import Admit
from pagemesh.wire.tokens import pack
from pagemesh.wire.work_messages import (
    Abort,
    AbortReason,
    ChoiceStart,
    Resend,
    Submit,
)


def together(spec: RequestSpec, due: Iterable[Choice]) -> list[Choice]:
    """The first of ``due`` that one ``Submit`` can carry with their tokens so far; at least one."""
    group: list[Choice] = []
    room = spec.submit_tokens_max - len(spec.prompt)
    for choice in due:
        room -= choice.token_count
        if room < 0 and group:
            break
        group.append(choice)
    return group


def choose(spec: RequestSpec, group: Sequence[Choice], model_root: bytes | None) -> ChooseRoute:
    """The question to the router: who could take a new attempt at ``group``?"""
    longest = max(group, key=lambda choice: choice.token_count)
    return ChooseRoute(
        tokens=np.concatenate([spec.prompt, longest.tokens()]),
        growth_tokens=max(0, spec.sampling.max_tokens - longest.token_count),
        choice_count=len(group) * spec.width,
        avoid=frozenset[Worker]().union(*(choice.avoid for choice in group)),
        model_root=model_root,
        after=next((choice.failure for choice in group if choice.failure), ""),
    )


def submit(
    spec: RequestSpec,
    route: Route,
    group: Sequence[Choice],
    attempt: int,
    deadline_ms: int,
    *,
    timeout_ms: int,
    scored: bool,
) -> SendSubmit:
    """The ``Submit`` of ``group`` with the tokens already delivered, and the question to the pager
    that goes with it. ``scored``: prompt log-probabilities are not wanted, or not any more."""
    prompt = pack(spec.prompt)
    pages = _pages(spec, prompt, route, group[0], attempt, deadline_ms)
    message = Submit(
        request=spec.request,
        attempt=attempt,
        gateway=spec.gateway,
        gateway_incarnation=spec.gateway_incarnation,
        priority=spec.priority,
        arrival_us=spec.arrival_us,
        root=route.root,
        model_root=route.model_root,
        prompt=prompt,
        choices=[ChoiceStart(choice=c.index, generated=bytes(c.generated)) for c in group],
        sampling=spec.sampling,
        prompt_logprobs=not scored,
        read_cache=spec.read_cache,
        terms=spec.terms,
        decode=route.decode.name if route.decode else None,
        asked_as=None if pages is None else pages.message.asked_as,
        deadline_ms=deadline_ms,
    )
    return SendSubmit(route.worker, message, timeout_ms, pages)


def _pages(
    spec: RequestSpec, prompt: bytes, route: Route, first: Choice, attempt: int, deadline_ms: int
) -> AskPages | None:
    """What the worker would ask the pager once it has the ``Submit``. Asked now, it is answered by
    the time the worker has decoded the ``Submit`` (ADR 0026). None: the worker asks by itself."""
    beside, is_plain = route.pages, spec.read_cache and not spec.prompt_logprobs
    if beside is None or attempt > 1 or not is_plain or spec.sampling.beams is not None:
        return None
    length = len(spec.prompt)
    most = length + max(spec.sampling.max_tokens - 1, 0)
    message = Admit(
        key=SequenceKey(request=spec.request, attempt=attempt, choice=first.index),
        order=Order(
            priority=spec.priority,
            arrival_us=spec.arrival_us,
            request=spec.request,
            choice=first.index,
        ),
        worker=route.worker.name,
        incarnation=route.worker.incarnation,
        epoch=beside.epoch,
        root=route.root,
        tokens=prompt,
        reserve_tokens=beside.needs.reserve_tokens(length, most),
        terms=spec.terms,
        tokens_max=most,
        first_tokens=beside.needs.first_tokens,
        deadline_ms=deadline_ms,
    )
    return AskPages(beside.host, message)


def resend(spec: RequestSpec, choice: Choice) -> Resend:
    """Ask for everything from the next wanted position on."""
    key = SequenceKey(request=spec.request, attempt=choice.attempt, choice=choice.index)
    return Resend(key=key, position=choice.token_count)


def stop(key: SequenceKey) -> Abort:
    """Stop an attempt that is over here but still runs at a worker."""
    return Abort(request=key.request, attempt=key.attempt, choice=key.choice, reason="superseded")


def abort(spec: RequestSpec, choice: Choice, reason: AbortReason, whole: int | None) -> Abort:
    """Stop ``choice``, or every choice of each attempt up to ``whole``."""
    return Abort(
        request=spec.request,
        attempt=choice.attempt if whole is None else whole,
        choice=choice.index if whole is None else None,
        reason=reason,
    )
