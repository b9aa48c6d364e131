"""``DecoderStep.run``: steps of one token a row that follow one another in one native call.

Each step is that of ``decoder_step``, and what a row draws from its logits is its next token: the
first of the highest, or by ``softmax_draw``. Between two steps nothing of Python runs: on a model
that streams its weights the interpreter would find its caches empty each time.

A run ends where somebody has to decide: after ``step_count`` steps or ``for_us``, when ``end`` or
a word of ``waiting`` is not 0, when a lease no longer stands, when a row drew one of its stops, has
no slot for another token or logits that are no numbers, and before a step that would be refused.
What the last step draws is for the caller, from its logits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemesh.kernels.native.headers import LeaseWatch, address_of
from pagemesh.kernels.native.library import DrawsStruct, RunStruct
from pagemesh.kernels.softmax_draw import SUM_BLOCK

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Heat:
    """How rows are drawn that have a temperature. ``temperatures``: float32 [rows], each a normal
    number; ``uniforms``: float64 [steps, rows], in [0, 1); the limits are those of
    ``softmax_draw``, [rows] each, or all None."""

    temperatures: F32
    uniforms: F64
    min_p: F32 | None = None
    top_k: I64 | None = None
    top_p: F64 | None = None


@dataclass(frozen=True, slots=True)
class RunTerms:
    """How long a run goes on. ``heat``: None draws the first of the highest."""

    step_count: int
    leases: LeaseWatch
    """Of the rows, in order."""
    stops: Sequence[Sequence[int]]
    """Tokens after which a row has to be looked at, by row."""
    heat: Heat | None = None
    for_us: float = 0.0
    """No step is begun after so long."""
    end: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(1, np.uint32))
    waiting: Sequence[int] = ()
    """Addresses of 64-bit words."""


class RunDone(NamedTuple):
    """``drawn``: int64 [steps - 1, rows]; ``took_us``: float64 [steps]."""

    drawn: I64
    took_us: F64


class NativeRun:
    """The arguments of one run, and the memory that they point to."""

    def __init__(self, terms: RunTerms, rows: int, vocab: int) -> None:
        for name, count in (("stops", len(terms.stops)), ("leases", len(terms.leases))):
            if count != rows:
                raise ValueError(f"{name}: expected {rows} rows, got {count}")
        if terms.step_count < 1:
            raise ValueError(f"step_count: expected at least 1, got {terms.step_count}")
        _check("end", terms.end, (1,), np.uint32)
        self._terms = terms
        self._drawn = np.zeros((terms.step_count, rows), np.int64)
        self._took_us = np.zeros(terms.step_count, np.float64)
        self._stops = np.array([stop for own in terms.stops for stop in own], np.int64)
        self._indptr = np.cumsum([0, *map(len, terms.stops)], dtype=np.int64)
        self._waiting = (ctypes.c_uint64 * len(terms.waiting))(*terms.waiting)
        self._rows = np.arange(rows)
        self._sums = np.empty((rows, -(-vocab // SUM_BLOCK)) if terms.heat else 0, np.float64)
        self._draws = None if terms.heat is None else self._drawn_by(terms.heat, terms.step_count)

    def struct(
        self, decoder: int, pages: int, batch: int, outputs: Sequence[int], inputs: Sequence[int]
    ) -> RunStruct:
        """All of them addresses; ``outputs``: workspace, hidden, logits; ``inputs``: tokens,
        positions, slots, which are written over."""
        terms = self._terms
        return RunStruct(
            decoder, pages, batch, *outputs, *inputs,
            None if self._draws is None else ctypes.addressof(self._draws),
            address_of(self._sums), address_of(self._stops), address_of(self._indptr),
            *terms.leases.addresses, address_of(terms.end),
            ctypes.addressof(self._waiting), len(self._waiting),
            terms.step_count, terms.for_us, address_of(self._drawn), address_of(self._took_us),
        )  # fmt: skip

    def done(self, step_count: int) -> RunDone:
        return RunDone(self._drawn[: step_count - 1], self._took_us[:step_count])

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


def _check(
    name: str, array: NDArray[np.generic] | None, shape: tuple[int, ...], dtype: type[np.generic]
) -> None:
    if array is None:
        return
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{name}: expected contiguous {dtype.__name__} {list(shape)}")
