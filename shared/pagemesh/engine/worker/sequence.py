"""One sequence as its worker knows it.

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

A sequence ends as ``DONE`` here (finished, failed or aborted) or as ``HANDED`` (it goes on
at the decode worker); both keep its tokens for a while, so that frames can be sent again.
From every phase it can be aborted.
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
    """A sequence was asked to make a move its table does not have: a bug."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The life of a gateway that waits for a sequence."""

    name: str
    incarnation: int


@dataclass(slots=True)
class Ticket:
    """A sequence's way from prefill to decode, seen from either side."""

    ticket: str
    expires_ms: float
    handle: Handle | None = None
    """None: offered, and the pager has not answered."""
    tries: int = 0
    """Calls made in the present phase, by who offers."""
    busy_count: int = 0
    """Of its offers, those that were refused since there was no room for it."""
    expired: bool = False
    doubted: bool = False
    """The pager called it stale: it is asked once more, in a new session."""
    refused: bool = False
    """The decode worker said no: nobody else can be going on with the sequence."""

    def is_never_taken(self, offers_max: int) -> bool:
        """Whether so many offers were all refused for want of room: none was taken."""
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
    """Generated tokens it came with; what it draws itself begins there."""
    deadline_ms: float
    decode: str | None
    read_cache: bool
    submitted_ms: float
    """When this attempt came here: its age at this worker. Another attempt begins it anew."""
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
    """The call that its phase waits for is open."""
    queued: bool = False
    """The pager said that it waits for pages."""
    told: bool = False
    """Meanwhile a notice said that there are pages."""
    scores: list[TokenScores] = field(default_factory=list)
    """Of its last tokens, those it drew itself and, handed over, those that prefill drew, when
    log-probabilities are wanted."""
    prompt_scores: list[TokenScores] = field(default_factory=list)
    waterfall: Waterfall | None = None
    """Of its first admission; a frame that is sent again says it again."""
    waterfall_told: bool = False
    cached_tokens: int = 0
    computed_tokens: int = 0
    is_again: bool = False
    """It was admitted before, or its prompt was, for another choice: what is cached then is no
    news."""
    preempted_count: int = 0
    lost_tokens: int = 0
    finish: Finish | None = None
    stop_token: int | None = None
    failure: Failure | None = None
    ended_ms: float = 0.0
    stops: frozenset[int] = frozenset()
    forked_pages: int = 0
    """Full pages that a fork gave it."""
    passed_count: int = 0
    """Steps in a row in which others had all the rows; see ``batching``."""
    beams: BeamGroup | None = None
    """Not None: nothing is drawn, its likeliest continuations are searched for."""
    history: list[Phase] = field(default_factory=list)

    @property
    def generated_count(self) -> int:
        return self.tokens.length - self.prompt_count

    @property
    def tokens_max(self) -> int:
        """Slots this sequence can ever fill: the last token's K and V are never needed."""
        return self.prompt_count + max(self.sampling.max_tokens - 1, 0)

    @property
    def saved_pages(self) -> int:
        """Pages that its beams, or it and its leader, did not each hold for themselves."""
        return self.beams.saved_pages if self.beams is not None else self.forked_pages

    @property
    def scored_from(self) -> int:
        """Generated tokens from there on have scores, when log-probabilities are wanted."""
        return self.generated_count - len(self.scores)

    @property
    def ended(self) -> bool:
        return self.phase in _ENDS

    @property
    def has_first_token(self) -> bool:
        return self.generated_count > 0

    @property
    def scoring(self) -> bool:
        """The prompt's own log-probabilities are wanted and not complete: it is computed
        from its start, whatever is cached."""
        if not self.prompt_logprobs:
            return False
        have = sum(len(scores.chosen) for scores in self.prompt_scores) // 4
        return have < self.prompt_count - 1

    def move(self, phase: Phase) -> None:
        """Go to ``phase``. Raises ``IllegalMove``, with where it came from."""
        if phase not in _MOVES[self.phase]:
            path = " -> ".join(past.name for past in [*self.history, self.phase])
            raise IllegalMove(f"{self.key}: {phase.name} does not follow {path}")
        if len(self.history) == _HISTORY_MAX:
            del self.history[0]
        self.history.append(self.phase)
        self.phase = phase

    def check(self) -> None:
        wants = self.phase in RUNNABLE or self.phase is Phase.OFFERING
        if self.phase is not Phase.FORKING:  # where the children get theirs meanwhile
            assert (self.lease is not None) == wants, (self.key, self.phase, self.lease)
        if self.lease is not None:
            assert self.lease.filled <= self.tokens.length, self.key
        assert self.ended == (self.ended_ms > 0.0), (self.key, self.phase)
        for follower in self.followers:
            assert follower.leader is self, self.key
        if self.beams is not None:
            self.beams.check()
