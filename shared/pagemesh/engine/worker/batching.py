"""Which sequences a step computes, and how many tokens of each: a pure choice.

    drawing rows       all that fit, so that nobody who reads an answer waits for a prompt
    prompts, in order  what fits beside them into the time between two tokens

Where sequences want more rows than a step has, those have them that are first in the order of
sequences, prompts taken together as one. Whoever had none in ``PASSED_MAX`` steps goes before that
order for a step, the longest passed over first: so nobody stands still. That takes half of the
rows at most, so that the first in the order go on however many there are.

With nobody to wait for it a prompt has the whole step. Otherwise prompts have what the target of
the time between two tokens leaves, or several times as long as a step of those who read takes
without them: ``PROMPTS_RATIO_MIN`` to ``PROMPTS_RATIO_MAX`` times, the more prompts wait and the
fewer read. Whoever reads is held up by a prompt for as long as it takes to compute, in few steps or
in many; in few, its first text comes sooner, and more answers share each reading of the weights.
How many prompt tokens that is, is learnt from the steps that were run (``costs``). Who reads may
read from another worker of the host, whose steps take turns with these.

Prompts are computed by priority, then by how many times longer than the rest of them takes to
compute they have been here (highest response ratio next). So who needs little, because it is
short, cached or almost done, soon goes before who needs much; and since the ratio of who waits
grows without end, nobody starves. A little rest is computed with the chunk before it: its first
text would come a whole step later. Beside others of another priority whoever waits becomes
more urgent by a level each time that a level is worth (``LEVEL_US``).
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
"""What a prompt gets of each step however long that takes: it must come to its end."""
CHUNK_TOKENS_ALONE_MIN = 64
"""The same of a step without drawing rows: the weights are read for its prompts alone."""
CHUNK_TOKENS_STEP = 8
"""Chunks are multiples of it: products are computed so many rows at a time."""
REST_SHARE = 8
"""What is left of a prompt goes with a chunk that is so many times as long."""
UNKNOWN_TOKENS_MAX = 64
"""Prompt tokens beside drawing rows before it is known what they cost."""
IDLE_US_MIN = 4_000
"""A step without prompts counts as no shorter than this, or than the time between two reports."""
ALONE_US_MIN = 20_000
"""What a step of prompts alone may take, where no target is set: nobody reads faster."""
PROMPT_WEIGHT = 4
"""So many who read answers count as much as one whose prompt waits."""
PROMPTS_RATIO_MIN, PROMPTS_RATIO_MAX = 4.0, 8.0
"""Time for prompts by that of the step without them (``IDLE_US_MIN``), where no target is set."""
GUESSED_TOKEN_US = 100.0
"""What a prompt token takes, before it was seen what it does."""
PASSED_MAX = 8
"""Steps in a row in which others may have all the rows before somebody goes first."""

_PROMPTS = 0
"""Stands for all of them where rows are given out: which goes, is decided among them."""


@dataclass(frozen=True, slots=True)
class Wish:
    """``count`` tokens of ``sequence`` from position ``start`` on could be computed now: they are
    known, and have slots."""

    sequence: Sequence
    start: int
    count: int
    row_count: int = 1
    """Rows of the step that it takes: of a search one for each beam, all or none."""
    left_count: int = 0
    """Tokens that are left of its prompt; there may not be slots for all of them yet."""

    @property
    def draws(self) -> bool:
        """Whether somebody waits for the token that these lead to."""
        return self.sequence.phase is Phase.DECODE and self.count == 1


def passed_over(wishes: Rows[Wish], chosen: Rows[Wish]) -> frozenset[Sequence]:
    """Who of ``wishes`` had no row of a step with those ``chosen`` because others had them all.
    No prompt had when none did: those behind the first wait for time, not for rows."""
    if len(chosen) == len(wishes):  # most of the time
        return frozenset()
    going = {wish.sequence for wish in chosen}
    prompts_go = not all(wish.draws for wish in chosen)
    left = [wish for wish in wishes if wish.sequence not in going]
    return frozenset(wish.sequence for wish in left if wish.draws or not prompts_go)


def _begin(row: Row) -> int:
    """Tokens before it in its context, or in that of each beam."""
    beams = row.sequence.beams
    return beams.length if row.beam_count and beams is not None else row.lease.filled


@dataclass(slots=True)
class Batching:
    """``itl_target_ms``: the longest that somebody who draws should wait for a token; 0: as the
    number of those who wait for their first one warrants."""

    step_tokens_max: int
    """Of prompts, drawing rows not counted."""
    chunk_tokens_max: int
    """Tokens of one sequence in one step; both but for little rests."""
    rows_max: int
    itl_target_ms: int = 0
    stream_ms: int = 0
    """Tokens are sent at most this often."""
    costs: StepCosts = field(default_factory=StepCosts)
    readers: Readers = field(default=NO_READERS, init=False)
    """Of other workers of the host, lately."""
    _noted: list[tuple[Rows[Row], list[int], Rows[StepResult]]] = field(
        default_factory=list, init=False
    )

    def note(self, rows: Rows[Row], results: Rows[StepResult]) -> None:
        """``results`` of steps over ``rows``, whose leases do not count them as filled yet: there
        is something to ``learn``."""
        self._noted.append((rows, [_begin(row) for row in rows], results))

    def learn(self) -> None:
        """How long steps take, from what was noted."""
        noted, self._noted = self._noted, []
        for rows, begins, results in noted:
            self._learn_from(rows, begins, results)

    def _learn_from(self, rows: Rows[Row], begins: Rows[int], results: Rows[StepResult]) -> None:
        """Of a row whose lease had ended little or nothing was computed: that tells nothing."""
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
        """Part of ``wishes``, which are in order of precedence, each with at least one token and
        at most as many as wished. ``now_ms``: the clock of ``Sequence.submitted_ms``."""
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
        """Who draws where not all fit, and the rows of that: a row less than there are when it is
        the turn of prompts. A search that is wider than a step has one for itself."""
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
        """What of ``wishes``, in this order, goes beside ``draws`` into ``rows_left`` rows; never
        nothing."""
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
        """Time for prompts, of which ``waiting_count`` wait, in a step with ``draws``."""
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
        """Tokens of ``wish`` for ``spare_us``, but at least ``least``. Less than a useful chunk is
        none."""
        count = max(self.costs.tokens_within(spare_us, wish.start), least)
        if count >= wish.count:
            return wish.count
        return count - count % CHUNK_TOKENS_STEP if count >= CHUNK_TOKENS_MIN else 0

    def _precedence(
        self, wish: Wish, now_ms: float, *, ages: bool
    ) -> tuple[int, float, OrderPlace]:
        """``ages``: there are others of another priority, so that whoever waits becomes more
        urgent."""
        sequence = wish.sequence
        left = max(wish.left_count, wish.count)
        rest_us = self.costs.prompt_us(wish.start, left) or GUESSED_TOKEN_US * left
        waited_us = 1_000.0 * (now_ms - sequence.submitted_ms)
        level = sequence.order.priority - (waited_us // LEVEL_US if ages else 0)
        return int(level), -waited_us / rest_us, sequence.order.place
