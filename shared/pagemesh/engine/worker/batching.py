"""Which sequences a step computes, and how many tokens of each. Pure.

    drawing rows       all that fit, so that no reader of an answer waits for a prompt
    prompts, in order  as many tokens as fit beside them into the time between two tokens

If sequences want more rows than a step has, the rows go to the first in the order of sequences,
where all prompts together count as one. A sequence without a row in ``PASSED_MAX`` consecutive
steps goes first for one step, the longest passed over before others, so that none starves. Such
sequences get at most half of the rows, so that the first in the order always make progress.

If nobody is reading answers, prompts get the whole step. Otherwise they get the time that the
target inter-token latency leaves. Without a target they get several times the time that a step
takes without them: ``PROMPTS_RATIO_MIN`` to ``PROMPTS_RATIO_MAX`` times, the more prompts wait and
the fewer readers there are. A prompt holds up the readers for as long as it takes to compute, in
few steps or in many; in few, its own first token comes sooner, and more answers share each reading
of the weights. How many prompt tokens fit is learnt from the steps that were run (``costs``).
Readers may also read from another worker of the host, whose steps take turns with ours.

Prompts go by priority, then by the ratio of the time that they have waited to the time that the
rest of them takes to compute (highest response ratio next). So a prompt that needs little, because
it is short, cached or almost done, soon precedes one that needs much; and since the ratio of a
waiting prompt grows without bound, none starves. A small rest of a prompt is computed together
with the chunk before it, as its first token would otherwise come a whole step later. While prompts
of several priorities wait, each becomes one level more urgent per ``LEVEL_US`` of waiting.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from pagemesh.engine.worker.costs import StepCosts, StepShape, drawing, prompt
from pagemesh.engine.worker.desk import Row
from pagemesh.engine.worker.plan import NO_READERS, Readers, StepResult
from pagemesh.engine.worker.sequence import Phase, Sequence
from pagemesh.wire.messages import LEVEL_US, OrderPlace

CHUNK_TOKENS_MIN = 16
"""Tokens that the first prompt gets in each step, however long they take, so that it finishes."""
CHUNK_TOKENS_ALONE_MIN = 64
"""The same in a step without drawing rows, which reads the weights for prompts alone."""
CHUNK_TOKENS_STEP = 8
"""Chunks are multiples of this, since matrix products compute this many rows at a time."""
REST_SHARE = 8
"""The rest of a prompt is computed with a chunk that is at least this many times as long."""
UNKNOWN_TOKENS_MAX = 64
"""Prompt tokens beside drawing rows while their cost is not known."""
IDLE_US_MIN = 4_000
"""A step without prompts counts as at least this long, and as long as the time between reports."""
ALONE_US_MIN = 20_000
"""A step of prompts alone may always take this long if no target is set: nobody reads faster."""
PROMPT_WEIGHT = 4
"""This many readers count as much as one waiting prompt."""
PROMPTS_RATIO_MIN, PROMPTS_RATIO_MAX = 4.0, 8.0
"""Bounds of the time for prompts, divided by that of a step without them (``IDLE_US_MIN``), if no
target is set."""
GUESSED_TOKEN_US = 100.0
"""Assumed time of a prompt token until it has been measured."""
PASSED_MAX = 8
"""Consecutive steps without a row after which a sequence goes first."""

_PROMPTS = 0
"""Stands for all prompts while rows are assigned; which of them get rows is decided later."""


@dataclass(frozen=True, slots=True)
class Wish:
    """``count`` tokens of ``sequence`` from position ``start`` on could be computed now: their ids
    are known, and they have slots."""

    sequence: Sequence
    start: int
    count: int
    row_count: int = 1
    """Rows of the step that it takes: for a beam search one per beam, all or none."""
    left_count: int = 0
    """Tokens left to compute, including those without slots yet."""

    @property
    def draws(self) -> bool:
        """Whether somebody reads the answer and waits for its next token."""
        return self.sequence.phase is Phase.DECODE and self.count == 1


def passed_over(wishes: Rows[Wish], chosen: Rows[Wish]) -> frozenset[Sequence]:
    """Sequences of ``wishes`` that get no row because those ``chosen`` take all rows. Prompts are
    among them only if none was chosen: otherwise they wait for time, not for rows."""
    if len(chosen) == len(wishes):  # most of the time
        return frozenset()
    going = {wish.sequence for wish in chosen}
    prompts_go = not all(wish.draws for wish in chosen)
    left = [wish for wish in wishes if wish.sequence not in going]
    return frozenset(wish.sequence for wish in left if wish.draws or not prompts_go)


def _begin(row: Row) -> int:
    """Tokens that precede the row in its context, or in that of each beam."""
    beams = row.sequence.beams
    return beams.length if row.beam_count and beams is not None else row.lease.filled


@dataclass(slots=True)
class Batching:
    """``itl_target_ms``: the longest that a reader should wait for a token; 0: depends on how many
    prompts and readers there are."""

    step_tokens_max: int
    """Prompt tokens in one step."""
    chunk_tokens_max: int
    """Prompt tokens of one sequence in one step. A small rest may exceed either limit."""
    rows_max: int
    itl_target_ms: int = 0
    stream_ms: int = 0
    """Least time between two reports of tokens."""
    costs: StepCosts = field(default_factory=StepCosts)
    readers: Readers = field(default=NO_READERS, init=False)
    """Those of other workers of the host, as last reported."""
    _noted: list[tuple[Rows[Row], list[int], Rows[StepResult]]] = field(
        default_factory=list, init=False
    )

    def note(self, rows: Rows[Row], results: Rows[StepResult]) -> None:
        """Keep ``results`` of steps over ``rows`` for ``learn``. To be called before the leases
        count the slots of ``rows`` as filled."""
        self._noted.append((rows, [_begin(row) for row in rows], results))

    def learn(self) -> None:
        """Update ``costs`` by the steps noted."""
        noted, self._noted = self._noted, []
        for rows, begins, results in noted:
            self._learn_from(rows, begins, results)

    def _learn_from(self, rows: Rows[Row], begins: Rows[int], results: Rows[StepResult]) -> None:
        """Ignores steps with a revoked row, of which little or nothing was computed."""
        if any(row.revoked for result in results for row in result.rows):
            return
        took_us = [step_us for result in results for step_us in result.took_us]
        if not took_us or not rows:
            return
        middle = (len(took_us) - 1) // 2
        starts: list[int] = []
        prompts = StepShape()
        for row, begin in zip(rows, begins, strict=True):
            if row.beam_count:
                starts += [begin] * row.beam_count
            elif row.draws:
                starts.append(begin + middle)
            else:
                prompts += prompt(begin, row.count)
        self.costs.observe(drawing(starts) + prompts, sum(took_us) / len(took_us))

    def choose(self, wishes: Iterable[Wish], now_ms: float) -> list[Wish]:
        """A selection of ``wishes``, which come in the order of sequences, each with at least one
        and at most all of its tokens. ``now_ms``: by the clock of ``Sequence.submitted_ms``."""
        wishes = list(wishes)
        chosen: list[Wish] = []
        prompts: list[Wish] = []
        rows_count = 0
        for wish in wishes:
            if wish.draws:
                chosen.append(wish)
                rows_count += wish.row_count
            else:
                prompts.append(wish)
        if rows_count + bool(prompts) > self.rows_max:
            chosen, rows_count = self._fitting(wishes)
        rows_left = self.rows_max - rows_count
        if prompts and rows_left > 0:
            if len(prompts) > 1:
                ages = len({wish.sequence.order.priority for wish in prompts}) > 1
                prompts.sort(key=lambda wish: self._precedence(wish, now_ms, ages=ages))
            chosen += self._prompts(prompts, chosen, rows_left)
        return chosen

    def _fitting(self, wishes: list[Wish]) -> tuple[list[Wish], int]:
        """The drawing wishes to compute if not all fit, and the number of their rows, which leaves
        a row if prompts are to get one. A beam search wider than a step gets a step of its own."""
        due = [wish for wish in wishes if wish.sequence.passed_count >= PASSED_MAX]
        due.sort(key=lambda wish: -wish.sequence.passed_count)
        chosen: list[Wish] = []
        taken: set[int] = set()
        rows_count = 0
        for those, rows_max in ((due, self.rows_max // 2), (wishes, self.rows_max)):
            for wish in those:
                who = id(wish.sequence) if wish.draws else _PROMPTS
                if who in taken or (taken and rows_count + wish.row_count > rows_max):
                    continue
                taken.add(who)
                rows_count += wish.row_count
                if wish.draws:
                    chosen.append(wish)
        return chosen, rows_count - (_PROMPTS in taken)

    def _prompts(self, wishes: list[Wish], draws: list[Wish], rows_left: int) -> list[Wish]:
        """The prompts of ``wishes``, in this order, to compute beside ``draws`` in at most
        ``rows_left`` rows; at least one."""
        chosen: list[Wish] = []
        room = self.step_tokens_max
        spare_us = None
        if draws or self.readers.rows:
            if self.costs.knows_prompts:
                spare_us = self._spare_us(draws, len(wishes))
            else:
                room = min(room, UNKNOWN_TOKENS_MAX)
        least = CHUNK_TOKENS_MIN if draws else CHUNK_TOKENS_ALONE_MIN
        for wish in wishes:
            count = min(wish.count, self.chunk_tokens_max, room)
            if spare_us is not None:
                count = min(count, self._chunk(wish, spare_us, least))
                spare_us -= self.costs.prompt_us(wish.start, count) if count else 0.0
                least = 0
            if count <= 0 or len(chosen) == rows_left:
                break
            if not self.itl_target_ms and (wish.count - count) * REST_SHARE <= count:
                count = wish.count
            chosen.append(Wish(wish.sequence, wish.start, count))
            room -= count
        return chosen

    def _spare_us(self, draws: list[Wish], waiting_count: int) -> float:
        """Microseconds for prompts, of which ``waiting_count`` wait, in a step with ``draws``."""
        starts = [wish.start for wish in draws for _ in range(wish.row_count)]
        alone_us = float(self.readers.step_us)
        if draws:
            alone_us += self.costs.us(drawing(starts))
        if self.itl_target_ms:
            return 1_000.0 * self.itl_target_ms - alone_us
        ratio = PROMPT_WEIGHT * waiting_count / (len(starts) + self.readers.rows)
        ratio = max(PROMPTS_RATIO_MIN, min(ratio, PROMPTS_RATIO_MAX))
        spare_us = ratio * max(alone_us, IDLE_US_MIN, 1_000 * self.stream_ms)
        return spare_us if draws else max(spare_us, ALONE_US_MIN)

    def _chunk(self, wish: Wish, spare_us: float, least: int) -> int:
        """Tokens of ``wish`` that fit into ``spare_us``, but at least ``least``; 0 if that is less
        than a useful chunk."""
        count = max(self.costs.tokens_within(spare_us, wish.start), least)
        if count >= wish.count:
            return wish.count
        return count - count % CHUNK_TOKENS_STEP if count >= CHUNK_TOKENS_MIN else 0

    def _precedence(
        self, wish: Wish, now_ms: float, *, ages: bool
    ) -> tuple[int, float, OrderPlace]:
        """The key to sort by, smallest first. ``ages``: prompts of several priorities wait, so
        each becomes more urgent with time."""
        sequence = wish.sequence
        left = max(wish.left_count, wish.count)
        rest_us = self.costs.prompt_us(wish.start, left) or GUESSED_TOKEN_US * left
        waited_us = 1_000.0 * (now_ms - sequence.submitted_ms)
        level = sequence.order.priority - (waited_us // LEVEL_US if ages else 0)
        return int(level), -waited_us / rest_us, sequence.order.place
