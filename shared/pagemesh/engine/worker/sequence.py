"""A sequence as its worker sees it: its phases and its state.

    submit ->  WAITING <----------------------------+ revoked: keeps its tokens
                | ^ refused, or leases are declared |
                v |                                 |
              ADMITTING -granted-> PREFILL ---------+-> DECODE -> DONE
                                     |  first token |     ^
             several choices: FORKING <-------------+     | refused or withdrawn
                                     |              |     |
    FOLLOWING --leader's first token-+--> OFFERING -+-----+
                                            |             |
                                            v             |
                                         OFFERED -> WITHDRAWING
                                            |             |
    attach -> REDEEMING -> DECODE           +---> HANDED <+

A sequence ends as ``DONE`` here (finished, failed or aborted) or as ``HANDED`` (it continues
at the decode worker). Either way its tokens are kept for a while, so that frames can be resent.
It can be aborted in every phase before that.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from pagemesh.engine.worker.beam_group import BeamGroup
from pagemesh.engine.worker.lease import Lease, TokenBuffer
from pagemesh.engine.worker.plan import TokenScores
from pagemesh.wire.cache_terms import NO_TERMS, CacheTerms
from pagemesh.wire.messages import Order, SequenceKey
from pagemesh.wire.pager_messages import Handle, Waterfall
from pagemesh.wire.work_messages import Failure, Finish, Sampling


class Phase(enum.Enum):
    FOLLOWING = "waits for its leader's prompt"
    WAITING = "wants pages"
    ADMITTING = "asked for pages"
    PREFILL = "computes its context"
    DECODE = "draws tokens"
    FORKING = "shares its prompt among its choices"
    OFFERING = "asked for a ticket"
    OFFERED = "asked decode to take over"
    WITHDRAWING = "wants its ticket back"
    REDEEMING = "turns a ticket into pages"
    HANDED = "went on elsewhere"
    DONE = "ended here"


_ENDS = frozenset({Phase.HANDED, Phase.DONE})
RUNNABLE = frozenset({Phase.PREFILL, Phase.DECODE})
_MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.FOLLOWING: frozenset({Phase.WAITING, Phase.FORKING, Phase.DONE}),
    Phase.WAITING: frozenset({Phase.ADMITTING, Phase.DONE}),
    Phase.ADMITTING: frozenset({Phase.WAITING, Phase.PREFILL, Phase.DECODE, Phase.DONE}),
    Phase.PREFILL: frozenset(
        {Phase.DECODE, Phase.FORKING, Phase.OFFERING, Phase.WAITING, Phase.DONE}
    ),
    Phase.DECODE: frozenset({Phase.WAITING, Phase.DONE}),
    Phase.FORKING: frozenset({Phase.DECODE, Phase.OFFERING, Phase.WAITING, Phase.DONE}),
    Phase.OFFERING: frozenset({Phase.OFFERED, Phase.DECODE, Phase.WAITING, Phase.DONE}),
    Phase.OFFERED: frozenset({Phase.HANDED, Phase.WITHDRAWING, Phase.WAITING, Phase.DONE}),
    Phase.WITHDRAWING: frozenset({Phase.DECODE, Phase.HANDED, Phase.WAITING, Phase.DONE}),
    Phase.REDEEMING: frozenset({Phase.PREFILL, Phase.DECODE, Phase.WAITING, Phase.DONE}),
    Phase.HANDED: frozenset(),
    Phase.DONE: frozenset(),
}
_HISTORY_MAX = 32


class IllegalMove(AssertionError):
    """A change of phase that ``_MOVES`` does not allow: a bug."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The gateway incarnation that waits for a sequence."""

    name: str
    incarnation: int


@dataclass(slots=True)
class Ticket:
    """The handover of a sequence from prefill to decode, as seen by either side."""

    ticket: str
    expires_ms: float
    handle: Handle | None = None
    """None until the pager has answered the offer."""
    tries: int = 0
    """Calls that the offering side has made in the current phase."""
    busy_count: int = 0
    """Offers that the pager refused because it had no room for the ticket."""
    expired: bool = False
    doubted: bool = False
    """The pager refused it as ``Stale``: it is redeemed once more, in a new session."""
    refused: bool = False
    """The decode worker cannot have the sequence: it was never asked, or refused the first try."""

    def is_never_taken(self, offers_max: int) -> bool:
        """Whether ``offers_max`` offers or more were all refused for lack of room, so that the
        ticket certainly has no lease."""
        return self.busy_count == self.tries >= offers_max


@dataclass(slots=True, eq=False)
class Sequence:
    key: SequenceKey
    order: Order
    owner: Owner
    root: bytes
    sampling: Sampling
    tokens: TokenBuffer
    prompt_count: int
    start_count: int
    """Generated tokens that it arrived with; those drawn here start at this position."""
    deadline_ms: float
    decode: str | None
    read_cache: bool
    submitted_ms: float
    """When this attempt arrived at this worker. The age of each attempt is counted separately."""
    terms: CacheTerms = NO_TERMS
    prompt_logprobs: bool = False
    phase: Phase = Phase.WAITING
    lease: Lease | None = None
    ticket: Ticket | None = None
    leader: Sequence | None = None
    followers: list[Sequence] = field(default_factory=list)
    retry_ms: float = 0.0
    retries: int = 0
    calling: bool = False
    """The call whose answer its phase waits for is open."""
    queued: bool = False
    """The pager has answered ``Queued``: it waits for pages."""
    told: bool = False
    """A notice since the last ``Admit`` said that its pages are there."""
    scores: list[TokenScores] = field(default_factory=list)
    """If log-probabilities are wanted: those of the last tokens, which were drawn here or, before
    a handover, by prefill."""
    prompt_scores: list[TokenScores] = field(default_factory=list)
    waterfall: Waterfall | None = None
    """Of its first admission. Repeated when its first frame is resent."""
    waterfall_told: bool = False
    cached_tokens: int = 0
    computed_tokens: int = 0
    is_again: bool = False
    """It was admitted before, or its prompt was for another choice, so tokens found in the cache
    do not count as hits."""
    preempted_count: int = 0
    lost_tokens: int = 0
    finish: Finish | None = None
    stop_token: int | None = None
    failure: Failure | None = None
    ended_ms: float = 0.0
    stops: frozenset[int] = frozenset()
    forked_pages: int = 0
    """Full pages that a fork gave it, shared with its leader."""
    passed_count: int = 0
    """Consecutive steps in which other sequences took all rows; see ``batching``."""
    beams: BeamGroup | None = None
    """Not None: a beam search, which draws no tokens."""
    history: list[Phase] = field(default_factory=list)

    @property
    def generated_count(self) -> int:
        return self.tokens.length - self.prompt_count

    @property
    def tokens_max(self) -> int:
        """The most slots it can ever fill: K and V of the last token are never needed."""
        return self.prompt_count + max(self.sampling.max_tokens - 1, 0)

    @property
    def saved_pages(self) -> int:
        """Pages saved because its beams, or it and its leader, share them."""
        return self.beams.saved_pages if self.beams is not None else self.forked_pages

    @property
    def scored_from(self) -> int:
        """The first generated position that has scores, if log-probabilities are wanted."""
        return self.generated_count - len(self.scores)

    @property
    def ended(self) -> bool:
        return self.phase in _ENDS

    @property
    def has_first_token(self) -> bool:
        return self.generated_count > 0

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of the prompt are wanted and not complete: the prompt is then
        computed from its start, whatever is cached."""
        if not self.prompt_logprobs:
            return False
        have = sum(len(scores.chosen) for scores in self.prompt_scores) // 4
        return have < self.prompt_count - 1

    def move(self, phase: Phase) -> None:
        """Change to ``phase``. Raises ``IllegalMove``, which names the phases so far."""
        if phase not in _MOVES[self.phase]:
            path = " -> ".join(past.name for past in [*self.history, self.phase])
            raise IllegalMove(f"{self.key}: {phase.name} does not follow {path}")
        if len(self.history) == _HISTORY_MAX:
            del self.history[0]
        self.history.append(self.phase)
        self.phase = phase

    def check(self) -> None:
        wants = self.phase in RUNNABLE or self.phase is Phase.OFFERING
        if self.phase is not Phase.FORKING:  # children get their leases in this phase
            assert (self.lease is not None) == wants, (self.key, self.phase, self.lease)
        if self.lease is not None:
            assert self.lease.filled <= self.tokens.length, self.key
        assert self.ended == (self.ended_ms > 0.0), (self.key, self.phase)
        for follower in self.followers:
            assert follower.leader is self, self.key
        if self.beams is not None:
            self.beams.check()
