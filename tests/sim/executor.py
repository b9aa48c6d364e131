"""Runs step plans on a pool's memory with the hash model, in three phases between which other
processes may act: read the fences, read and write pages, read the fences again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from tests.sim import model
from tests.sim.memory import PoolMemory
from tests.sim.world import Broken

from pagemesh.engine.worker.plan import (
    Drawn,
    RowResult,
    Sample,
    StepPlan,
    StepResult,
    StepRow,
    TokenScores,
)

Root = Callable[[StepRow], bytes]


@dataclass(slots=True)
class Running:
    """One running step."""

    plan: StepPlan
    memory: PoolMemory
    writer: int
    weights: int
    root_of: Root
    fence_after: bool
    """False plants a bug: the revocation words are not read a second time."""
    stopped: set[int]
    results: list[RowResult]
    foreign: set[int] = field(default_factory=set)
    """Leases that have read a page of another growth or root."""

    @classmethod
    def launch(
        cls,
        plan: StepPlan,
        memory: PoolMemory,
        writer: int,
        weights: int,
        root_of: Root,
        seen: set[tuple[int, int]],
        *,
        fence_after: bool,
    ) -> Running:
        """Read the fences. ``seen``: grants whose pages have been checked before."""
        stopped: set[int] = set()
        for row in plan.rows:
            grant = (row.lease, row.granted_at)
            if grant not in seen:
                pages = row.page_table.tolist()
                if any(memory.sequences[page] > row.granted_at for page in pages):
                    stopped.add(row.lease)
                seen.add(grant)
            if memory.words.get(row.lease_slot, 0) != row.lease:
                stopped.add(row.lease)
        return cls(plan, memory, writer, weights, root_of, fence_after, stopped, [])

    def compute(self) -> None:
        """Copy, read and write pages."""
        memory = self.memory
        for source, target in self.plan.copies:
            for offset, value in enumerate(memory.slots[source]):
                memory.write(target, offset, value, self.writer, memory.grown[source])
        for row in self.plan.rows:
            if row.lease in self.stopped:
                self.results.append(RowResult(row.key, row.lease, revoked=True))
            else:
                self.results.append(self._row(row))

    def finish(self) -> StepResult:
        """Read the fences again."""
        rows: list[RowResult] = []
        for row, result in zip(self.plan.rows, self.results, strict=True):
            intact = self.memory.words.get(row.lease_slot, 0) == row.lease
            if intact and row.lease in self.foreign:
                raise Broken(
                    f"{row.key} reads what is of another growth of its root, or of another root"
                )
            if intact or not self.fence_after or result.revoked:
                rows.append(result)
            else:
                rows.append(RowResult(row.key, row.lease, revoked=True))
        return StepResult(self.plan.step, tuple(rows))

    def _row(self, row: StepRow) -> RowResult:
        memory, size, table = self.memory, self.memory.page_size, row.page_table.tolist()
        value, growth = model.root_value(self.root_of(row)), memory.growths[row.lease]
        if any(memory.grown[page] != growth for page in table[: -(-row.start // size)]):
            self.foreign.add(row.lease)
        if row.start:
            before = row.start - 1
            value = memory.slots[table[before // size]][before % size]
        values: list[int] = []
        position = row.start
        for token in row.tokens.tolist():
            value = model.slot_value(value, token, self.weights)
            values.append(value)
            memory.write(table[position // size], position % size, value, self.writer, growth)
            position += 1
        drawn: tuple[Drawn, ...] = ()
        if row.samples:
            slots: list[int] = []
            for page in table[: -(-position // size)]:
                slots.extend(memory.slots[page])
            context = model.context_value(slots[:position])
            drawn = tuple(_draw(sample, context) for sample in row.samples)
            if self.plan.repeat_count and row.samples[0].sampling.logprobs is None:
                return self._ahead(row, slots[:position], growth)
        scores: TokenScores | None = None
        if row.score_from is not None:
            following = [*row.tokens.tolist()[1:]]
            if row.score_next is not None:
                following.append(row.score_next)
            pairs = zip(values, following, strict=False)
            scores = TokenScores(b"".join(model.prompt_score(*pair) for pair in pairs))
        return RowResult(row.key, row.lease, revoked=False, drawn=drawn, prompt_scores=scores)

    def _ahead(self, row: StepRow, slots: list[int], growth: int) -> RowResult:
        """A row of a run, in which drafts are computed, too. What wrong drafts wrote stays until it
        is overwritten."""
        memory, size, table = self.memory, self.memory.page_size, row.page_table.tolist()
        drafted, right = _guesses(row, self.plan.repeat_count)
        (sample,) = row.samples
        before: list[int] = []
        drawn = _draw(sample, model.context_value(slots))
        while len(before) < right and drawn.token not in row.stops:
            before.append(drawn.token)
            value = model.slot_value(slots[-1], drawn.token, self.weights)
            at = len(slots)
            memory.write(table[at // size], at % size, value, self.writer, growth)
            slots.append(value)
            drawn = _draw(sample.after(*before), model.context_value(slots))
        for at in range(len(slots), len(slots) + drafted - len(before)):
            memory.write(table[at // size], at % size, -at, self.writer, growth)
        return RowResult(
            row.key, row.lease, False, (drawn,), before=tuple(before), drafted_count=drafted
        )


def _guesses(row: StepRow, count_max: int) -> tuple[int, int]:
    """The number of drafts of a step, and how many are right: arbitrary, but deterministic."""
    luck = hash((row.lease, row.start, 11))
    count = min(luck % 7, count_max)
    return count, luck // 7 % (count + 1)


def candidates(values: np.ndarray, count: int) -> TokenScores:
    """The ``count`` likeliest tokens by ``values``, float32 [vocab]."""
    best = np.argsort(-values, kind="stable")[:count]
    ids = best.astype("<u4").tobytes()
    return TokenScores(b"", len(best), ids, values[best].astype("<f4").tobytes())


def _draw(sample: Sample, context: int) -> Drawn:
    if sample.candidate_count:
        own = sample.sampling
        masked = own.stop_tokens if sample.generated_count < own.min_tokens else []
        values = model.logprobs(context, masked)
        return Drawn(sample.key, 0, candidates=candidates(values, sample.candidate_count))
    token = model.draw(context, sample.sampling.seed, sample.key.choice, sample.generated_count)
    if sample.sampling.logprobs is None:
        return Drawn(sample.key, token)
    return Drawn(sample.key, token, TokenScores(model.score(context, token)))
