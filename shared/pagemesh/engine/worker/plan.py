"""What one step computes, and what came of it. Plain values: the scheduler makes plans
without knowing the model, the executor runs them without knowing why.

A plan may be the first of a **run**: steps over the same rows, each of which computes the
tokens that the one before drew (``plan_after``). Whoever steps goes on by itself, so that no
thread waits for the scheduler between two tokens; the scheduler hears of every step, and may
end the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.tokens import U32
from pagemesh.wire.work_messages import Sampling


@dataclass(frozen=True, slots=True)
class Sample:
    """One token to draw from a row's last logits.

    ``context`` are prompt and generated ids before the run, of which the first
    ``prompt_count`` are the prompt; ``drawn`` are those of earlier steps of the run.
    """

    key: SequenceKey
    sampling: Sampling
    context: U32
    prompt_count: int
    drawn: tuple[int, ...] = ()
    candidate_count: int = 0
    """Not 0: draw nothing, but report so many of the likeliest tokens."""
    beam_length: int = 0
    """Generated tokens that are not here: those of a beam, which nobody who reports looks at."""

    @property
    def generated_count(self) -> int:
        """The position, among generated tokens, of the one to draw."""
        return len(self.context) + len(self.drawn) + self.beam_length - self.prompt_count

    @property
    def tokens(self) -> U32:
        """uint32 [n], prompt and generated ids so far. Made anew in a run: few draws look."""
        if not self.drawn:
            return self.context
        return np.concatenate((self.context, np.array(self.drawn, self.context.dtype)))

    def after(self, *tokens: int) -> Sample:
        """What is drawn next, once these were."""
        drawn = (*self.drawn, *tokens)
        return Sample(self.key, self.sampling, self.context, self.prompt_count, drawn)


@dataclass(frozen=True, slots=True)
class StepRow:
    """A run of one sequence's tokens: positions ``[start, start + len(tokens))``.

    ``page_table``: uint32 [pages]; slots below ``start`` hold K and V already.
    The step writes the slots of ``tokens`` and nothing else.
    """

    key: SequenceKey
    lease: int
    lease_slot: int
    granted_at: int
    """The fence: the first step under a grant checks that no page of the table was given out
    later than this."""
    page_table: U32
    tokens: U32
    start: int
    samples: tuple[Sample, ...] = ()
    """Drawn from the logits of the last token; several when choices fork there."""
    score_from: int | None = None
    """Also report the log-probability of each following token from this position on
    (prompt log-probabilities), with ``score_width`` alternatives."""
    score_width: int = 0
    score_next: int | None = None
    """The prompt token right after this run, whose score the last logits give."""
    stops: frozenset[int] = frozenset()
    """Drawn tokens after which the scheduler has to decide: they end a run."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """``copies`` (source page, target page) are done first, then all ``rows`` in one forward;
    there are no rows when only copies wait."""

    step: int
    """The same number for all steps of a run."""
    rows: tuple[StepRow, ...]
    copies: tuple[tuple[int, int], ...] = ()
    repeat_count: int = 0
    """Steps that may follow without asking, or tokens that a row may draw in them. Only if every
    row is one token, drawn from once, and has slots for as many more."""

    @property
    def drawing_rows(self) -> int:
        """Rows whose one token leads to the next: somebody reads what they draw."""
        return sum(len(row.tokens) == 1 and bool(row.samples) for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """float32 ``chosen`` [n]; ``top_tokens`` uint32 and ``top_values`` float32 [n, width]."""

    chosen: bytes
    width: int = 0
    top_tokens: bytes = b""
    top_values: bytes = b""

    @property
    def poisoned(self) -> bool:
        """One of the logits scored was no number."""
        return bool(np.isnan(np.frombuffer(self.chosen, "<f4")).any())


@dataclass(frozen=True, slots=True)
class Drawn:
    """The token drawn for one ``Sample``."""

    key: SequenceKey
    token: int
    scores: TokenScores | None = None
    poisoned: bool = False
    """The highest logit was no finite number: ``token`` means nothing."""
    candidates: TokenScores | None = None
    """What was reported in place of a draw, likeliest first; those that may not come have minus
    infinity. ``chosen`` is empty."""


@dataclass(frozen=True, slots=True)
class RowResult:
    key: SequenceKey
    lease: int
    revoked: bool
    """The lease ended before the step's results could be trusted: nothing of it counts."""
    drawn: tuple[Drawn, ...] = ()
    prompt_scores: TokenScores | None = None
    before: tuple[int, ...] = ()
    """Tokens drawn before the one in ``drawn``, whose K and V were computed, too: by earlier steps
    of the same call, or as drafts that were right."""
    drafted_count: int = 0
    """Drafts that were computed, right or wrong."""

    @property
    def poisoned(self) -> bool:
        """What it computed is no numbers, and so may its pages be; other rows are as good as
        ever."""
        scores = self.prompt_scores
        return any(one.poisoned for one in self.drawn) or (scores is not None and scores.poisoned)


def revoked_row(row: StepRow) -> RowResult:
    """What came of a row whose lease has ended."""
    return RowResult(row.key, row.lease, revoked=True)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Of one step, or of several of a run that were computed in one call."""

    step: int
    rows: tuple[RowResult, ...]
    took_us: tuple[int, ...] = (0,)
    """What each of them took."""

    def accepted_count(self, row: RowResult) -> int:
        """Drafts of ``row`` that were right: in each step it drew one token beside them."""
        return 0 if row.revoked else 1 + len(row.before) - len(self.took_us)


@dataclass(frozen=True, slots=True)
class Readers:
    """Those who read answers of other workers, whose steps take turns with this one's."""

    rows: int = 0
    """That the other workers draw in a step."""
    step_us: int = 0
    """What a step of each of them took, in all."""


NO_READERS = Readers()


@dataclass(frozen=True, slots=True)
class Ahead:
    """How long a run may go on before anybody is asked; a step that has begun is finished."""

    for_us: float = 0.0
    end: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(1, np.uint32))
    """One word; not 0: no further step. Others write it while the run goes on."""
    waiting: tuple[int, ...] = ()
    """Addresses of 64-bit words; not 0: others wait for the cores."""


class Executor(Protocol):
    """Runs plans. Called from one thread at a time."""

    def run(self, plan: StepPlan) -> StepResult:
        """Compute ``plan``; reads each row's revocation word before and after."""
        ...


def plan_after(plan: StepPlan, result: StepResult) -> StepPlan | None:
    """The next step of the run, or None when the scheduler has to decide: a row may draw no more,
    a lease ended, a row is poisoned, or a token was drawn that may end its sequence."""
    left = plan.repeat_count - max((1 + len(row.before) for row in result.rows), default=1)
    if left < 0:
        return None
    rows: list[StepRow] = []
    for row, outcome in zip(plan.rows, result.rows, strict=True):
        if outcome.revoked or outcome.poisoned or outcome.drawn[0].token in row.stops:
            return None
        token = outcome.drawn[0].token
        samples = (row.samples[0].after(*outcome.before, token),)
        tokens = np.array([token], np.dtype("<u4"))
        start = row.start + 1 + len(outcome.before)
        rows.append(replace(row, tokens=tokens, start=start, samples=samples))
    return StepPlan(plan.step, tuple(rows), repeat_count=left)
