"""Runs step plans: copies, fences, one forward pass, draws and scores.

    before            check revocation words, and headers of pages that were not checked before
    on the device     page copies, forward pass, draws, prompt scores
    after             check the same words and headers again, once the device is done

The results of a row whose lease ended in between are thrown away. Its writes were harmless: nobody
is given its writable pages until this worker acknowledges the revocation, which it does after the
step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pagemesh.engine import run_ahead
from pagemesh.engine.device import HOST, StepDevice
from pagemesh.engine.grammars import Followers, Grammars
from pagemesh.engine.memory_box import MemoryBox
from pagemesh.engine.pool import WorkerPool
from pagemesh.engine.step_arrays import ArrayKeeper, targets, wanted_count
from pagemesh.engine.worker.plan import (
    Ahead,
    Drawn,
    RowResult,
    Sample,
    StepPlan,
    StepResult,
    StepRow,
    TokenScores,
    revoked_row,
)
from pagemesh.kernels.native.headers import LeaseWatch
from pagemesh.kernels.ops import KvPool, PageLayout, RaggedBatch, RunDone, RunTerms
from pagemesh.wire.errors import Fault
from pagemesh.wire.pager_messages import SessionOpened

I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]
RunSteps = Callable[[torch.Tensor, RaggedBatch, torch.Tensor, KvPool, RunTerms], RunDone]
"""See ``kernels.decoder_step.run``."""
_SCORED_ROWS_MAX = 64
"""Rows of logits held at once while a prompt is scored; each is as wide as the vocabulary."""


class StepDecoder(Protocol):
    """What a step needs of a model: ``forward.Decoder``, ``fallback.FallbackDecoder``, or a
    device's decoder."""

    def step(
        self,
        tokens: torch.Tensor,
        batch: RaggedBatch,
        wanted: torch.Tensor,
        pool: KvPool,
        *,
        logits: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``forward.Decoder.step``."""
        ...

    @property
    def run(self) -> RunSteps | None:
        """Runs several successive steps in one call; ``None`` if this decoder cannot."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab], on the decoder's device, of ``hidden`` rows from ``step``."""
        ...


class ModelExecutor:
    """``plan.Executor`` over a decoder and the pool in use. One thread at a time."""

    def __init__(
        self,
        decoder: StepDecoder,
        layout: PageLayout,
        device: StepDevice = HOST,
        box: MemoryBox | None = None,
        draft_tokens_max: int = 0,
        prepare: Callable[[KvPool], None] | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """``device`` is the decoder's; ``box`` holds the memory of pools whose pages are not in
        their files; ``draft_tokens_max``: drafts per sequence in a step of a run; ``prepare``:
        called with a pool before its first step; without ``grammars`` no sample may have one."""
        self._decoder = decoder
        self._layout = layout
        self._device = device
        self._box = box
        self._prepare = prepare
        self._pool: WorkerPool | None = None
        self._fence: Fence | None = None
        self._arrays = ArrayKeeper(layout.page_size)
        self._followers = Followers(grammars) if grammars is not None else None
        self._guesses = run_ahead.Guesses(draft_tokens_max)

    def use_opened(self, opened: SessionOpened) -> None:
        """Run later plans over the pool that a pager named. The previous pool is released first,
        or its memory could not be freed. Raises like ``WorkerPool.attach``."""
        self.close()
        self.use(WorkerPool.attach(opened, self._layout, self._box))

    def use(self, pool: WorkerPool) -> None:
        """Run later plans over ``pool``; the previous one is released."""
        if self._pool is not None:
            self._pool.close()
        self._pool = pool
        self._fence = Fence(pool)
        if self._prepare is not None:
            self._prepare(pool.pages)

    def let_go_discarded(self) -> bool:
        """Release the pool if it was discarded, since others wait for its memory; returns whether
        it was."""
        if self._box is None or not self._box.is_discarded:
            return False
        self.close()
        self._box.unmap_discarded()
        return True

    def close(self) -> None:
        """Release the pool."""
        if self._pool is not None:
            self._pool.close()
        self._pool = self._fence = None

    def run(self, plan: StepPlan) -> StepResult:
        """See ``plan.Executor``. Raises ``RuntimeError`` without a pool, ``IndexError`` or
        ``ValueError`` for a plan that does not fit it."""
        started_ns = time.perf_counter_ns()
        pool, fence = self._pool, self._fence
        if pool is None or fence is None:
            raise RuntimeError(f"step {plan.step} came before any pool")
        stood = fence.enter(plan.rows)
        self._device.copy_pages(pool.pages, plan.copies)
        live = plan.rows
        if not all(stood):
            live = tuple(row for row, stand in zip(plan.rows, stood, strict=True) if stand)
        with torch.inference_mode():
            results = iter(self._compute(pool, live))
        computed = [
            next(results) if stand else revoked_row(row)
            for row, stand in zip(plan.rows, stood, strict=True)
        ]
        self._device.finish()
        took_us = (time.perf_counter_ns() - started_ns) // 1_000
        return self._left(plan, computed, stood, (took_us,))

    def run_on(self, plan: StepPlan, ahead: Ahead) -> StepResult:
        """Compute a plan and, where one native call can do it, the steps that follow it, for as
        long as ``ahead`` allows. Results are bit for bit those of separate steps. A single step may
        have drafts too. Raises like ``run``."""
        pool, fence = self._pool, self._fence
        in_one_call = ahead.for_us > 0.0 or self._guesses.wanted
        run = self._decoder.run if in_one_call and run_ahead.can_run(plan) else None
        if pool is None or fence is None or run is None:
            return self.run(plan)
        started_ns = time.perf_counter_ns()
        stood = fence.enter(plan.rows)
        if not all(stood):
            return self.run(plan)
        terms = run_ahead.terms_of(plan, fence.watch, ahead, self._guesses)
        with torch.inference_mode():
            made = self._arrays.arrays(plan.rows)
            done = run(made.tokens, made.batch, made.wanted, pool.pages, terms)
        computed = run_ahead.results_of(plan, done)
        took_us = [int(step_us) for step_us in done.took_us]
        # Time spent once for all of them is counted as the last one's.
        took_us[-1] += (time.perf_counter_ns() - started_ns) // 1_000 - sum(took_us)
        return self._left(plan, computed, stood, tuple(took_us))

    def _left(
        self,
        plan: StepPlan,
        computed: Sequence[RowResult],
        stood: Sequence[bool],
        took_us: tuple[int, ...],
    ) -> StepResult:
        """The result of ``plan``, in which rows whose leases no longer stand are revoked."""
        assert self._fence is not None
        stands = self._fence.leave(plan.rows, stood)
        rows = tuple(
            result if stand else revoked_row(row)
            for row, result, stand in zip(plan.rows, computed, stands, strict=True)
        )
        return StepResult(plan.step, rows, took_us)

    def _compute(self, pool: WorkerPool, rows: Sequence[StepRow]) -> list[RowResult]:
        if not rows:
            return []
        made = self._arrays.arrays(rows)
        # Unless prompts are scored, the wanted rows are those that tokens are drawn from.
        hidden, logits = self._decoder.step(
            made.tokens, made.batch, made.wanted, pool.pages, logits=not made.scoring
        )
        drawn = self._draw(rows, hidden, made.ends - 1, logits)
        if not made.scoring:
            return [
                RowResult(row.key, row.lease, False, own)
                for row, own in zip(rows, drawn, strict=True)
            ]
        return [
            RowResult(row.key, row.lease, False, own, self._score(row, hidden, end))
            for row, own, end in zip(rows, drawn, made.ends.tolist(), strict=True)
        ]

    def _draw(
        self, rows: Sequence[StepRow], hidden: torch.Tensor, last: I64, logits: torch.Tensor | None
    ) -> list[tuple[Drawn, ...]]:
        """Every row's draws, in one batch: from ``logits``, which have one row for each row that
        draws, or else from ``hidden[last[row]]``."""
        if logits is not None and all(len(row.samples) == 1 for row in rows):
            samples = [row.samples[0] for row in rows]
            own = np.arange(len(rows))
            return [(one,) for one in self._drawn(logits, own, samples)]
        drawing = [index for index, row in enumerate(rows) if row.samples]
        out: list[tuple[Drawn, ...]] = [()] * len(rows)
        if not drawing:
            return out
        if logits is None:
            logits = self._decoder.logits(hidden[torch.from_numpy(last[drawing])])
        samples = [sample for index in drawing for sample in rows[index].samples]
        widths = [len(rows[index].samples) for index in drawing]
        own = np.repeat(np.arange(len(drawing)), widths)
        drawn = self._drawn(logits, own, samples)
        at = 0
        for index, width in zip(drawing, widths, strict=True):
            out[index] = drawn[at : at + width]
            at += width
        return out

    def _drawn(self, logits: torch.Tensor, rows: I64, samples: list[Sample]) -> tuple[Drawn, ...]:
        """See ``StepDevice.draw``; draws follow the grammars of ``samples``."""
        refused: dict[int, Drawn] = {}
        if self._followers is not None and any(one.sampling.grammar for one in samples):
            for index, found in enumerate(self._followers.allowed(samples)):
                if isinstance(found, Fault):
                    refused[index] = Drawn(samples[index].key, 0, refusal=found.message)
                elif found is not None:
                    samples[index] = replace(samples[index], allowed=found)
        drawn = self._device.draw(logits, rows, samples)
        if not refused:
            return drawn
        return tuple(refused.get(index, one) for index, one in enumerate(drawn))

    def _score(self, row: StepRow, hidden: torch.Tensor, end: int) -> TokenScores | None:
        """The row's prompt scores, from its hidden states, which end at ``end``."""
        scored = targets(row)
        if scored is None:
            return None
        first = end - wanted_count(row)
        parts = []
        for start in range(0, len(scored), _SCORED_ROWS_MAX):
            part = scored[start : start + _SCORED_ROWS_MAX]
            logits = self._decoder.logits(hidden[first + start : first + start + len(part)])
            parts.append(self._device.score(logits, part, row.score_width))
        return _joined(parts)


class Fence:
    """Checks, before and after a step, that its pages are still those that its rows were granted.

    Pages of a grant that the previous step checked are not checked again: they are never taken away
    without a change of the revocation word. The same goes for pages that a beam takes later under
    the same grant, though no row had them at the time of the check: until the word changes, they
    belong to the lease.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._watched: list[tuple[int, int]] = []
        self._watch = pool.watch([], [])
        self._fresh_grants: list[tuple[int, StepRow]] = []
        self._checked: dict[int, int] = {}
        """Lease to grant, for the rows of the last step, whose pages were checked."""

    def enter(self, rows: Sequence[StepRow]) -> list[bool]:
        """For each row: whether its lease stands and its pages are those of its grant."""
        watched = [(row.lease_slot, row.lease) for row in rows]
        if watched != self._watched:
            self._watched = watched
            slots, leases = [slot for slot, _ in watched], [lease for _, lease in watched]
            self._watch = self._pool.watch(slots, leases)
        checked = self._checked
        self._fresh_grants = [
            (index, row)
            for index, row in enumerate(rows)
            if checked.get(row.lease) != row.granted_at
        ]
        return self._check()

    @property
    def watch(self) -> LeaseWatch:
        """Watches the leases of the current step's rows."""
        return self._watch

    def leave(self, rows: Sequence[StepRow], stood: Sequence[bool]) -> list[bool]:
        """The same check of the same rows after the step; a row that failed in ``enter`` stays
        failed."""
        stands = [now and before for now, before in zip(self._check(), stood, strict=True)]
        if self._fresh_grants or len(self._checked) != len(rows) or not all(stands):
            self._checked = {
                row.lease: row.granted_at for row, stand in zip(rows, stands, strict=True) if stand
            }
        return stands

    def _check(self) -> list[bool]:
        stands = self._watch.standing()
        for index, row in self._fresh_grants:
            stands[index] = stands[index] and self._pool.is_fresh(row)
        return stands


def _joined(parts: Sequence[TokenScores]) -> TokenScores:
    return TokenScores(
        chosen=b"".join(part.chosen for part in parts),
        width=parts[0].width if parts else 0,
        top_tokens=b"".join(part.top_tokens for part in parts),
        top_values=b"".join(part.top_values for part in parts),
    )
