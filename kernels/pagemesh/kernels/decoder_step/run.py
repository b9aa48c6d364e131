"""``DecoderStep.run``: successive steps of one token per row in one native call.

Each step is a ``decoder_step``, and the token that a row draws from its logits is its next input:
the first of the highest, or one drawn by ``softmax_draw``. No Python runs between two steps: with a
model that streams its weights, the interpreter would find the CPU's caches cold each time.

With ``Drafts`` a step also computes the tokens that each sequence is likely to draw next, guessed
from what followed its last tokens before (speculative decoding by prompt lookup), and keeps those
that are then drawn. Results are the same, bit for bit: operations are row-invariant wherever they
are without drafts, and each token has a uniform of its own.

A run ends when a decision is needed: after ``token_count`` tokens of a sequence or ``for_us``,
when ``end`` or a word of ``waiting`` is not 0, when a lease no longer stands, when a row drew one
of its stops, has no slot for another token, or has logits that are not finite.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemesh.kernels.native.headers import LeaseWatch, address_of
from pagemesh.kernels.native.library import (
    CHANCES,
    DraftsStruct,
    DrawsStruct,
    RunStruct,
)
from pagemesh.kernels.softmax_draw import SUM_BLOCK

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Heat:
    """How rows with a temperature are drawn. ``temperatures``: float32 [rows], each a normal (not
    subnormal) number, or 0 to draw the first of the highest; ``uniforms``: float64 [steps, rows],
    in [0, 1); the limits are those of ``softmax_draw``, [rows] each, or all None."""

    temperatures: F32
    uniforms: F64
    min_p: F32 | None = None
    top_k: I64 | None = None
    top_p: F64 | None = None


@dataclass(frozen=True, slots=True)
class Drafts:
    """What drafts are guessed from, and how many. ``histories``: uint32, for each row all of its
    tokens or the latest of them, the one in the batch included; ``chances``: float32 [rows,
    CHANCES], estimates of how likely a guess is right, 0 at first: MUTATED."""

    histories: Sequence[U32]
    chances: F32
    each_max: int
    """Drafts of a sequence in a step."""
    rows_max: int
    """Rows of a step, drafts included. With that many sequences there are no drafts."""


@dataclass(frozen=True, slots=True)
class RunTerms:
    """How a run draws and when it ends. ``heat``: None draws the first of the highest."""

    token_count: int
    """The most tokens drawn for each sequence."""
    leases: LeaseWatch
    """Watches the leases of the rows, in order."""
    stops: Sequence[Sequence[int]]
    """By row, tokens that end the run when the row draws them."""
    heat: Heat | None = None
    for_us: float = 0.0
    """No further step is begun after this many microseconds."""
    end: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(1, np.uint32))
    waiting: Sequence[int] = ()
    """Addresses of 64-bit words."""
    drafts: Drafts | None = None


class RunDone(NamedTuple):
    """``drawn``: int64 [rows, tokens], of which row i has the first ``counts[i]``: a token of each
    step and the drafts that were right; the last is -1 if its logits were not finite. ``drafted``:
    drafts of each row, right or wrong. ``counts`` and ``drafted`` are int64 [rows], ``took_us`` is
    float64 [steps]."""

    drawn: I64
    counts: I64
    drafted: I64
    took_us: F64


class NativeRun:
    """The arguments of one run, and the memory that they point to."""

    def __init__(self, terms: RunTerms, rows: int, vocab: int) -> None:
        for name, given in (("stops", len(terms.stops)), ("leases", len(terms.leases))):
            if given != rows:
                raise ValueError(f"{name}: expected {rows} rows, got {given}")
        count = terms.token_count
        if count < 1:
            raise ValueError(f"token_count: expected at least 1, got {count}")
        _check("end", terms.end, (1,), np.uint32)
        self._terms = terms
        self.rows_max = rows_max(terms, rows)
        self._done = RunDone(
            np.empty((rows, count), np.int64), np.zeros(rows, np.int64), np.zeros(rows, np.int64),
            np.empty(count, np.float64),
        )  # fmt: skip
        self._stops = np.array([stop for own in terms.stops for stop in own], np.int64)
        self._indptr = np.cumsum([0, *map(len, terms.stops)], dtype=np.int64)
        self._waiting = (ctypes.c_uint64 * len(terms.waiting))(*terms.waiting)
        self._rows = np.arange(rows)
        blocks = -(-vocab // SUM_BLOCK)
        self._sums = np.empty((self.rows_max, blocks) if terms.heat else 0, np.float64)
        self._draws = None if terms.heat is None else self._drawn_by(terms.heat, count)
        self._drafts = None if terms.drafts is None else self._drafted_from(terms.drafts, count)

    def struct(self, decoder: int, pages: int, batch: int, outputs: Sequence[int]) -> RunStruct:
        """The struct for the native call. All arguments are addresses; ``outputs``: workspace,
        hidden, logits, for ``rows_max`` rows."""
        terms = self._terms
        return RunStruct(
            decoder, pages, batch, *outputs,
            None if self._drafts is None else ctypes.addressof(self._drafts),
            None if self._draws is None else ctypes.addressof(self._draws),
            address_of(self._sums), address_of(self._stops), address_of(self._indptr),
            *terms.leases.addresses, address_of(terms.end),
            ctypes.addressof(self._waiting), len(self._waiting),
            terms.token_count, terms.for_us, *map(address_of, self._done),
        )  # fmt: skip

    def done(self, steps: int) -> RunDone:
        return self._done._replace(took_us=self._done.took_us[:steps])

    def _drafted_from(self, drafts: Drafts, token_count: int) -> DraftsStruct:
        rows = len(self._rows)
        _check("chances", drafts.chances, (rows, CHANCES), np.float32)
        counts = [len(own) for own in drafts.histories]
        if len(counts) != rows:
            raise ValueError(f"histories: expected {rows} rows, got {len(counts)}")
        self._history = np.empty((rows, max(counts, default=0) + token_count), np.uint32)
        for to, own in zip(self._history, drafts.histories, strict=True):
            to[: len(own)] = own
        self._history_counts = np.array(counts, np.int64)
        return DraftsStruct(
            address_of(self._history), self._history.shape[1], address_of(self._history_counts),
            address_of(drafts.chances), drafts.each_max, drafts.rows_max,
        )  # fmt: skip

    def _drawn_by(self, heat: Heat, steps: int) -> DrawsStruct:
        count = len(self._rows)
        limits = (heat.min_p, heat.top_k, heat.top_p)
        for name, array, shape, dtype in (
            ("temperatures", heat.temperatures, (count,), np.float32),
            ("uniforms", heat.uniforms, (steps, count), np.float64),
            ("min_p", heat.min_p, (count,), np.float32),
            ("top_k", heat.top_k, (count,), np.int64),
            ("top_p", heat.top_p, (count,), np.float64),
        ):
            _check(name, array, shape, dtype)
        return DrawsStruct(
            address_of(self._rows), address_of(heat.temperatures), address_of(heat.uniforms),
            *(None if limit is None else address_of(limit) for limit in limits), count,
        )  # fmt: skip


def rows_max(terms: RunTerms, sequences: int) -> int:
    """The most rows that a step may have."""
    return max(sequences, terms.drafts.rows_max) if terms.drafts else sequences


def _check(
    name: str, array: NDArray[np.generic] | None, shape: tuple[int, ...], dtype: type[np.generic]
) -> None:
    if array is None:
        return
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{name}: expected contiguous {dtype.__name__} {list(shape)}")
