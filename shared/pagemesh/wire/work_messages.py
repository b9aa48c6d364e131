"""Messages between gateways and workers, and from prefill to decode.

    gateway -> worker     Submit      reply: Accepted
                          Abort       reply: Ok
                          Resend      reply: Ok, then Frames
    worker  -> worker     Attach      reply: Accepted
    worker  -> gateway    Frames      (a message; one per step and gateway)

Any request may be answered ``Refused``. Everything is idempotent by (request, attempt).
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from pagemesh.wire.cache_terms import NO_TERMS, CacheTerms
from pagemesh.wire.messages import (
    U64,
    Count,
    Digest,
    Message,
    Millis,
    Name,
    Order,
    Packed,
    RequestId,
    SequenceKey,
    ShortText,
    Value,
    registered,
)
from pagemesh.wire.pager_messages import AskedAs, Handle, Waterfall

TOP_LOGPROBS_MAX = 20
CHOICES_MAX = 128
BEAMS_MAX = 16
ENDS_MAX = 64
"""Tokens that end a choice."""
GRAMMAR_CHARACTERS_MAX = 256 << 10
REPETITION_PENALTY_MIN = 0.01
"""A logit divided by much less would overflow float32."""

Finish = Literal["stop", "length", "abort", "error"]
AbortReason = Literal["client", "stop", "superseded", "deadline", "error"]


class Beams(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Beam search for the likeliest continuations instead of drawing one. A finished one of
    log-probability ``p`` and ``l`` tokens scores ``p / l ** length_penalty``."""

    width: Annotated[int, Meta(ge=1, le=BEAMS_MAX)]
    """Number of running continuations, and of finished ones that are kept."""
    keep: Annotated[int, Meta(ge=1, le=BEAMS_MAX)]
    """How many finished continuations are wanted: at most ``width``."""
    length_penalty: Annotated[float, Meta(ge=-8.0, le=8.0)] = 1.0
    early_stopping: bool | Literal["never"] = False
    """Once ``width`` are finished: True ends the search; False ends it when the best running one
    would not be kept if it ended now; "never" only when it could not be kept at any length."""

    def pages_max(self, prompt_tokens: int, max_tokens: int, page_size: int) -> int:
        """The most pages that are ever needed at once. No beam needs the slot of its last token;
        all beams share the pages before the one that has the prompt's last slot."""
        shared = (prompt_tokens - 1) // page_size
        pages = -(-(prompt_tokens + max(max_tokens - 1, 0)) // page_size)
        return shared + self.width * (pages - shared)


class Sampling(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How tokens are drawn. What is drawn is a pure function of the logits, the tokens so
    far, these values and (seed, choice, position). Default values are not encoded, so that services
    of earlier versions take what they know."""

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_k: Count = 0
    """0: all."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=REPETITION_PENALTY_MIN, le=10.0)] = 1.0
    logit_bias: dict[Count, Annotated[float, Meta(ge=-100.0, le=100.0)]] = {}
    seed: U64 = 0
    max_tokens: Count
    min_tokens: Count = 0
    stop_tokens: Annotated[list[Count], Meta(max_length=ENDS_MAX)] = []
    """Token ids that end a choice, including the model's own end tokens unless ignored."""
    logprobs: Annotated[int, Meta(ge=-1, le=TOP_LOGPROBS_MAX)] | None = None
    """How many alternatives to report beside the chosen token; None: no log-probabilities."""
    grammar: Annotated[str, Meta(max_length=GRAMMAR_CHARACTERS_MAX)] = ""
    """What the answer must be, from its first token on, in llguidance's own JSON; empty: anything.
    Tokens that the grammar does not allow next are masked. Where it may end, ``stop_tokens`` are
    allowed, and nowhere else."""
    beams: Beams | None = None
    """Not None: nothing is drawn, and of the other fields only ``max_tokens``, ``min_tokens``,
    ``stop_tokens`` and ``logprobs`` count."""


class ChoiceStart(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One wanted choice and the tokens its client already has."""

    choice: Annotated[int, Meta(ge=0, le=1023)]
    generated: Packed = b""


@registered("work.submit")
class Submit(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Generate. ``decode`` names the worker to hand over to; None: keep the sequence.

    ``prompt_logprobs`` asks for the log-probability of each prompt token (the cache is then
    not read). ``root`` is the identity of the prefix tree to use, and ``model_root`` that of the
    weights and all else that its pages are computed with: ``Stale`` if the worker has others by
    now. ``asked_as``: on the worker's behalf the gateway has asked the pager for pages of the first
    choice, and the answer comes as a message of its own.
    """

    request: RequestId
    attempt: Annotated[int, Meta(ge=1, le=1000)]
    gateway: Name
    gateway_incarnation: U64
    priority: Annotated[int, Meta(ge=-1000, le=1000)]
    arrival_us: U64
    root: Digest
    model_root: Digest
    prompt: Packed
    choices: Annotated[list[ChoiceStart], Meta(min_length=1, max_length=CHOICES_MAX)]
    sampling: Sampling
    prompt_logprobs: bool = False
    read_cache: bool = True
    terms: CacheTerms = NO_TERMS
    decode: Name | None = None
    asked_as: AskedAs | None = None
    deadline_ms: Millis


@registered("work.accepted")
class Accepted(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    worker: Name
    incarnation: U64


@registered("work.attach")
class Attach(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Continue this sequence. Its pages are in ``handle``, to be redeemed with ``ticket``; if they
    are taken away after that, the tokens here suffice to admit it again. ``model_root``: as in
    ``Submit``. ``logprobs``: those of the last tokens of ``generated``, as far as they are known
    and wanted. They and ``waterfall`` were already sent, and may have to be sent again."""

    key: SequenceKey
    order: Order
    gateway: Name
    gateway_incarnation: U64
    prefill: Name
    root: Digest
    model_root: Digest
    prompt: Packed
    generated: Packed
    logprobs: TopLogprobs | None = None
    waterfall: Waterfall | None = None
    sampling: Sampling
    ticket: RequestId
    handle: Handle
    read_cache: bool = True
    terms: CacheTerms = NO_TERMS
    deadline_ms: Millis


@registered("work.abort")
class Abort(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stop every attempt of ``request`` up to ``attempt``; only ``choice`` when it is given."""

    request: RequestId
    attempt: Count
    choice: Count | None = None
    reason: AbortReason


@registered("work.resend")
class Resend(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frames were lost: send the tokens of ``key`` from generated position ``position`` on."""

    key: SequenceKey
    position: Count


class TopLogprobs(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log-probabilities of a run of tokens, packed.

    ``chosen``: float32 [tokens]. ``top_tokens``: uint32 [tokens, width] and ``top_values``:
    float32 [tokens, width], most likely first.
    """

    chosen: bytes
    width: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] = 0
    top_tokens: bytes = b""
    top_values: bytes = b""


class Hypothesis(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finished continuation of a beam search, with the log-probabilities of its tokens."""

    tokens: Packed
    logprobs: TopLogprobs
    score: float
    finish: Finish
    stop_token: Count | None = None


class Frame(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Tokens of one sequence, from generated position ``first_position`` on. There is about one
    frame per token, and most hold nothing else, so default values are not encoded."""

    key: SequenceKey
    first_position: Count
    tokens: Packed = b""
    logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None
    """In the first frame only, for prompt positions from 1 on."""
    waterfall: Waterfall | None = None
    """What the sequence's first admission found cached; in the first frame after it, and again
    when that frame is sent again."""
    computed_tokens: Count = 0
    finish: Finish | None = None
    stop_token: Count | None = None
    """The token id that ended the choice, which is then the last one in ``tokens``."""
    error: Failure | None = None
    hypotheses: list[Hypothesis] | None = None
    """The result of a beam search, best first, in its last frame; no other frame has tokens."""


class Failure(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a sequence ended in error: a code of ``wire.errors`` and a sentence."""

    code: ShortText
    message: ShortText


@registered("work.frames")
class Frames(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a step produced for one gateway. ``counter`` counts the messages from this
    worker incarnation to that gateway incarnation, from 1; a message without frames repeats
    the last counter, which reveals that the last message was lost."""

    worker: Name
    incarnation: U64
    gateway_incarnation: U64
    counter: U64
    frames: list[Frame]
