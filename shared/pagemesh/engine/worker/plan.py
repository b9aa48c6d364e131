"""Plans of steps and their results. Plain values: the scheduler makes plans without knowing the
model, and the executor runs them without knowing why.

A plan may be the first step of a **run**: steps over the same rows, each of which computes the
tokens that the one before drew (``plan_after``). The step thread continues a run by itself, so
that it does not wait for the scheduler between two tokens. The scheduler gets the results of
every step and may end the run.
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
    """One token to draw from the logits of a row's last token.

    ``context``: prompt and generated ids before the run, of which the first ``prompt_count``
    are the prompt. ``drawn``: ids that earlier steps of the run drew.
    """

    key: SequenceKey
    sampling: Sampling
    context: U32
    prompt_count: int
    drawn: tuple[int, ...] = ()
    candidate_count: int = 0
    """Not 0: draw nothing, but report this many of the most likely tokens."""
    allowed: NDArray[np.bool_] | None = None
    """bool [vocab]: the tokens that the sampling's grammar allows here, once they are known."""
    beam_length: int = 0
    """Generated tokens of a beam. They count, but are not in ``context``, since reporting
    candidates does not need their ids."""

    @property
    def generated_count(self) -> int:
        """The position, among generated tokens, of the one to draw."""
        return len(self.context) + len(self.drawn) + self.beam_length - self.prompt_count

    @property
    def tokens(self) -> U32:
        """uint32 [n], prompt and generated ids so far. Within a run each access copies them, as
        few draws need them."""
        if not self.drawn:
            return self.context
        return np.concatenate((self.context, np.array(self.drawn, self.context.dtype)))

    def after(self, *tokens: int) -> Sample:
        """The sample that follows once ``tokens`` have been drawn."""
        drawn = (*self.drawn, *tokens)
        return Sample(self.key, self.sampling, self.context, self.prompt_count, drawn)


@dataclass(frozen=True, slots=True)
class StepRow:
    """Consecutive tokens of one sequence: positions ``[start, start + len(tokens))``.

    ``page_table``: uint32 [pages]; slots below ``start`` already hold K and V.
    The step writes the slots of ``tokens`` and nothing else.
    """

    key: SequenceKey
    lease: int
    lease_slot: int
    granted_at: int
    """The fence, a ledger sequence of the pager: the first step under a grant checks that no page
    of the table was given out later than this."""
    page_table: U32
    tokens: U32
    start: int
    samples: tuple[Sample, ...] = ()
    """Drawn from the logits of the last token; several when choices fork there."""
    score_from: int | None = None
    """Not None: report prompt log-probabilities. Each position from this one on scores the token
    that follows it, with ``score_width`` alternatives."""
    score_width: int = 0
    score_next: int | None = None
    """The prompt token right after ``tokens``, which the last logits score."""
    stops: frozenset[int] = frozenset()
    """Tokens that end a run when drawn, since the scheduler has to decide."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """``copies`` (source page, target page) are done first, then all ``rows`` in one forward
    pass. There may be copies without rows."""

    step: int
    """The same number for all steps of a run."""
    rows: tuple[StepRow, ...]
    copies: tuple[tuple[int, int], ...] = ()
    repeat_count: int = 0
    """Tokens that each row may draw after its first, in this step or in steps that follow without
    asking the scheduler. Not 0 only if every row is one token with one sample, and has slots for
    this many more."""

    @property
    def drawing_rows(self) -> int:
        """How many rows draw from a single token: somebody is reading what they draw."""
        return sum(len(row.tokens) == 1 and bool(row.samples) for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probabilities of n tokens, packed: ``chosen`` float32 [n]; ``top_tokens`` uint32 and
    ``top_values`` float32 [n, width]."""

    chosen: bytes
    width: int = 0
    top_tokens: bytes = b""
    top_values: bytes = b""

    @property
    def poisoned(self) -> bool:
        """Whether a token's log-probability is NaN, because its logits were not numbers."""
        return bool(np.isnan(np.frombuffer(self.chosen, "<f4")).any())


@dataclass(frozen=True, slots=True)
class Drawn:
    """The token drawn for one ``Sample``."""

    key: SequenceKey
    token: int
    scores: TokenScores | None = None
    poisoned: bool = False
    """The highest logit was not finite, so ``token`` is meaningless."""
    refusal: str = ""
    """Not empty: why no token may follow under the sampling's grammar; ``token`` is meaningless."""
    candidates: TokenScores | None = None
    """Reported instead of a draw, most likely first; tokens that are not allowed have minus
    infinity. ``chosen`` is empty."""


@dataclass(frozen=True, slots=True)
class RowResult:
    key: SequenceKey
    lease: int
    revoked: bool
    """The lease ended before the step's results could be trusted: discard the row."""
    drawn: tuple[Drawn, ...] = ()
    prompt_scores: TokenScores | None = None
    before: tuple[int, ...] = ()
    """Tokens drawn before the one in ``drawn``, whose K and V were computed too: by earlier steps
    of the same call, or as accepted drafts."""
    drafted_count: int = 0
    """Drafts that were computed, accepted or not."""

    @property
    def poisoned(self) -> bool:
        """Whether it computed NaN or infinity, which its pages may then hold too. Other rows are
        not affected."""
        scores = self.prompt_scores
        return any(one.poisoned for one in self.drawn) or (scores is not None and scores.poisoned)


def revoked_row(row: StepRow) -> RowResult:
    """The result of a row whose lease has ended."""
    return RowResult(row.key, row.lease, revoked=True)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step, or of several steps of a run that were computed in one call."""

    step: int
    rows: tuple[RowResult, ...]
    took_us: tuple[int, ...] = (0,)
    """The duration of each of these steps."""

    def accepted_count(self, row: RowResult) -> int:
        """Accepted drafts of ``row``: in each step it drew one token besides them."""
        return 0 if row.revoked else 1 + len(row.before) - len(self.took_us)


@dataclass(frozen=True, slots=True)
class Readers:
    """Load from clients that read answers of other workers whose steps take turns with ours."""

    rows: int = 0
    """Drawing rows in the last steps of those workers, summed."""
    step_us: int = 0
    """Durations of those steps, summed."""


NO_READERS = Readers()


@dataclass(frozen=True, slots=True)
class Ahead:
    """How far one call may continue a run; a step that has begun is finished."""

    for_us: float = 0.0
    end: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(1, np.uint32))
    """uint32 [1]; once it is not 0, no further step begins. Other threads write it meanwhile."""
    waiting: tuple[int, ...] = ()
    """Addresses of 64-bit words. One that is not 0 says that another worker waits for the cores:
    no further step of this call begins."""


class Executor(Protocol):
    """Runs plans. Called from one thread at a time."""

    def run(self, plan: StepPlan) -> StepResult:
        """Compute ``plan``; reads each row's revocation word before and after."""
        ...


def plan_after(plan: StepPlan, result: StepResult) -> StepPlan | None:
    """The next step of the run, or None when the scheduler has to decide: a row may not draw more
    tokens, a lease ended, a row is poisoned or refused, or a drawn token may end its sequence."""
    left = plan.repeat_count - max((1 + len(row.before) for row in result.rows), default=1)
    if left < 0:
        return None
    rows: list[StepRow] = []
    for row, outcome in zip(plan.rows, result.rows, strict=True):
        if outcome.revoked or outcome.poisoned or outcome.drawn[0].refusal:
            return None
        token = outcome.drawn[0].token
        if token in row.stops:
            return None
        samples = (row.samples[0].after(*outcome.before, token),)
        tokens = np.array([token], np.dtype("<u4"))
        start = row.start + 1 + len(outcome.before)
        rows.append(replace(row, tokens=tokens, start=start, samples=samples))
    return StepPlan(plan.step, tuple(rows), repeat_count=left)
