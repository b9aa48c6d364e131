"""Runs step plans: copies, fences, one forward pass, draws and scores.

    revocation words, and the headers of pages new to us      before
    page copies, forward pass, draws, prompt scores
    the same words and headers again                          after

What a row whose lease ended in between computed is thrown away. Its writes were harmless: its
writable pages are given to nobody until this worker acknowledges, which is after the step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pagemesh.engine.forward import Decoder
from pagemesh.engine.pool import WorkerPool
from pagemesh.engine.sampler import draw, score
from pagemesh.engine.worker.plan import (
    Drawn,
    RowResult,
    StepPlan,
    StepResult,
    StepRow,
    TokenScores,
)
from pagemesh.kernels.ops import PageLayout, page_copy, ragged_batch
from pagemesh.wire.pager_messages import SessionOpened

I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]
_SCORED_ROWS_MAX = 64
"""Rows of logits held at once while a prompt is scored: a vocabulary wide each."""


class ModelExecutor:
    """``plan.Executor`` over a decoder and the pool in use. One thread at a time."""

    def __init__(self, decoder: Decoder, layout: PageLayout) -> None:
        self._decoder = decoder
        self._layout = layout
        self._pool: WorkerPool | None = None
        self._fenced: dict[int, int] = {}
        """Lease to grant, of the rows of the last step: their pages were checked."""

    def use_opened(self, opened: SessionOpened) -> None:
        """Run later plans over the pool that a pager named. Raises like ``WorkerPool.attach``."""
        self.use(WorkerPool.attach(opened, self._layout))

    def use(self, pool: WorkerPool) -> None:
        """Run later plans over ``pool``; the one before is let go."""
        if self._pool is not None:
            self._pool.close()
        self._pool = pool
        self._fenced = {}

    def close(self) -> None:
        """Let the pool go."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def run(self, plan: StepPlan) -> StepResult:
        """See ``plan.Executor``. Raises ``RuntimeError`` without a pool, ``IndexError`` or
        ``ValueError`` for a plan that does not fit it."""
        started_ns = time.perf_counter_ns()
        if self._pool is None:
            raise RuntimeError(f"step {plan.step} came before any pool")
        pool = self._pool
        fence = Fence(pool, plan.rows, self._fenced)
        stands = fence.check()
        page_copy(pool.pages, plan.copies)
        live = [row for row, stand in zip(plan.rows, stands, strict=True) if stand]
        with torch.inference_mode():
            results = dict(zip((row.lease for row in live), self._compute(pool, live), strict=True))
        stands &= fence.check()
        self._fenced = {
            row.lease: row.granted_at for row, stand in zip(plan.rows, stands, strict=True) if stand
        }
        return StepResult(
            step=plan.step,
            rows=tuple(
                results[row.lease] if stand else RowResult(row.key, row.lease, revoked=True)
                for row, stand in zip(plan.rows, stands, strict=True)
            ),
            duration_us=(time.perf_counter_ns() - started_ns) // 1_000,
        )

    def _compute(self, pool: WorkerPool, rows: Sequence[StepRow]) -> list[RowResult]:
        if not rows:
            return []
        counts = [len(row.tokens) for row in rows]
        batch = ragged_batch(
            [row.page_table for row in rows],
            [row.start for row in rows],
            counts,
            pool.pages.layout.page_size,
        )
        offsets = np.cumsum(counts) - counts
        wanted = [_wanted(row) for row in rows]
        indices = np.concatenate(
            [offset + local for offset, local in zip(offsets, wanted, strict=True)]
        )
        tokens = np.concatenate([row.tokens for row in rows]).astype(np.int64)
        # Unless prompts are scored, what is wanted is what is drawn from.
        scoring = any(row.score_from is not None for row in rows)
        hidden, logits = self._decoder.step(
            torch.from_numpy(tokens), batch, torch.from_numpy(indices), pool.pages,
            logits=not scoring,
        )  # fmt: skip
        ends = np.cumsum([len(local) for local in wanted])
        drawn = self._draw(rows, hidden, ends - 1, logits)
        return [
            RowResult(row.key, row.lease, False, own, self._score(row, hidden, end - len(local)))
            for row, own, local, end in zip(rows, drawn, wanted, ends.tolist(), strict=True)
        ]

    def _draw(
        self, rows: Sequence[StepRow], hidden: torch.Tensor, last: I64, logits: torch.Tensor | None
    ) -> list[tuple[Drawn, ...]]:
        """Every row's draws, from ``logits``, a row each, or ``hidden[last[row]]``; one batch
        for all."""
        drawing = [index for index, row in enumerate(rows) if row.samples]
        out: list[tuple[Drawn, ...]] = [()] * len(rows)
        if not drawing:
            return out
        if logits is None:
            logits = self._decoder.logits(hidden[torch.from_numpy(last[drawing])])
        samples = [sample for index in drawing for sample in rows[index].samples]
        widths = [len(rows[index].samples) for index in drawing]
        drawn = draw(logits.numpy(), np.repeat(np.arange(len(drawing)), widths), samples)
        at = 0
        for index, width in zip(drawing, widths, strict=True):
            out[index] = drawn[at : at + width]
            at += width
        return out

    def _score(self, row: StepRow, hidden: torch.Tensor, first: int) -> TokenScores | None:
        """The row's prompt scores, from ``hidden[first]`` on."""
        targets = _targets(row)
        if targets is None:
            return None
        parts = []
        for start in range(0, len(targets), _SCORED_ROWS_MAX):
            part = targets[start : start + _SCORED_ROWS_MAX]
            logits = self._decoder.logits(hidden[first + start : first + start + len(part)])
            parts.append(score(logits.numpy(), part, row.score_width))
        return _joined(parts)


class Fence:
    """Whether what a step reads is still what its rows were granted: asked before and after.

    Pages of a grant that the step before had checked (``fenced``: lease to grant) are not
    looked at again: they are not taken away without the revocation word.
    """

    def __init__(
        self, pool: WorkerPool, rows: Sequence[StepRow], fenced: Mapping[int, int]
    ) -> None:
        self._pool = pool
        self._slots = np.array([row.lease_slot for row in rows], np.uint32)
        self._leases = np.array([row.lease for row in rows], np.uint64)
        self._fresh_grants = [
            (index, row)
            for index, row in enumerate(rows)
            if fenced.get(row.lease) != row.granted_at
        ]

    def check(self) -> Bools:
        """bool [rows]: does the lease stand, and are its pages those of the grant?"""
        stands = self._pool.standing(self._slots, self._leases)
        for index, row in self._fresh_grants:
            stands[index] &= self._pool.is_fresh(row)
        return stands


def _first_scored(row: StepRow) -> int | None:
    """Index in the row's tokens of the first whose logits score the next token."""
    if row.score_from is None:
        return None
    return min(max(row.score_from - row.start, 0), len(row.tokens))


def _targets(row: StepRow) -> I64 | None:
    """int64 [n], the tokens to score: those after the first scored one, then the next."""
    first = _first_scored(row)
    if first is None:
        return None
    after = row.tokens[first + 1 :].astype(np.int64)
    if row.score_next is None or first == len(row.tokens):
        return after
    return np.append(after, row.score_next)


def _wanted(row: StepRow) -> I64:
    """int64 [n], ascending: the tokens of the row whose last hidden state is needed. The
    scored ones come first; a drawing row's last token is always the last."""
    targets, count = _targets(row), len(row.tokens)
    if targets is None or not len(targets):
        return np.array([count - 1] if row.samples else [], np.int64)
    first = _first_scored(row) or 0
    last = count if row.samples else first + len(targets)
    return np.arange(first, last)


def _joined(parts: Sequence[TokenScores]) -> TokenScores:
    return TokenScores(
        chosen=b"".join(part.chosen for part in parts),
        width=parts[0].width if parts else 0,
        top_tokens=b"".join(part.top_tokens for part in parts),
        top_values=b"".join(part.top_values for part in parts),
    )
