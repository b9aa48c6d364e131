"""Turns what workers send of a choice into what its client gets. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.choice import Choice, ChoiceText, slice_logprobs
from pagemesh.gateway.calls.spec import RequestSpec
from pagemesh.wire.tokens import U32
from pagemesh.wire.work_messages import Frame, Hypothesis, TopLogprobs


def of_frame(
    spec: RequestSpec, choice: Choice, frame: Frame, first: int, skip: int
) -> tuple[ev.Deliver, str | None]:
    """The delivery of ``frame`` without its first ``skip`` tokens, which starts at position
    ``first``; and the stop string that it completed, if any, after which no token counts."""
    tokens, scores = np.frombuffer(frame.tokens, "<u4"), frame.logprobs
    tokens = tokens[skip:] if skip else tokens
    ends = frame.finish == "stop" and frame.stop_token is not None
    if scores is not None:
        scores = slice_logprobs(scores, skip, skip + len(tokens))
    return _deliver(spec, choice.text, choice.index, first, tokens, scores, ends=ends)


def _deliver(
    spec: RequestSpec,
    text: ChoiceText,
    index: int,
    first: int,
    tokens: U32,
    scores: TopLogprobs | None,
    *,
    ends: bool,
) -> tuple[ev.Deliver, str | None]:
    """``ends``: the last of ``tokens`` is a stop token."""
    hidden = 1 if ends and not spec.show_stop else 0
    piece = text.push(tokens[: len(tokens) - hidden] if hidden else tokens)
    used = piece.used_count if piece.stop is not None else len(tokens)
    if piece.stop is not None:
        hidden = 0
    if scores is not None:
        scores = slice_logprobs(scores, 0, used)
    taken = tokens if used == len(tokens) else tokens[:used]
    return ev.Deliver(index, first, taken, piece.text, scores, hidden), piece.stop


def own_stop(spec: RequestSpec, token: int | None) -> ev.StopReason:
    """The stop token that the client is told has ended a choice: only one that it asked for."""
    return token if token in spec.own_stops else None


def search_answer(
    spec: RequestSpec, texts: Sequence[ChoiceText], hypotheses: Sequence[Hypothesis]
) -> list[ev.Deliver | ev.ChoiceEnded]:
    """The deliveries of a finished beam search: every choice, whole."""
    out: list[ev.Deliver | ev.ChoiceEnded] = []
    for index, (text, one) in enumerate(zip(texts, hypotheses, strict=True)):
        tokens = np.frombuffer(one.tokens, "<u4")
        scores = None if spec.sampling.logprobs is None else one.logprobs
        ends = one.stop_token is not None
        delivery, stop = _deliver(spec, text, index, 0, tokens, scores, ends=ends)
        reason = own_stop(spec, one.stop_token) if stop is None else stop
        stopped = stop is not None or one.finish == "stop"
        out += [
            delivery,
            ev.ChoiceEnded(index, "stop" if stopped else "length", reason, text.close()),
        ]
    return out
