"""A step's rows on the device, in one transfer.

All integers of a step travel in one array of int32, divided into sections:

    slots       2 * rows      int64, as two words each
    tokens      rows
    position    rows
    sequence    rows
    indptr      sequences + 1 where each sequence's page table starts
    blocks      4 * blocks    see ``paged_prefill.blocks``; none where a step only decodes
    wanted      wanted        rows whose hidden states are asked for
    tables      pages         page tables, concatenated

Each section begins at a multiple of 16 bytes: Triton compiles a kernel anew for every combination
of arguments that are so aligned and arguments that are not, and a combination that first occurs in
the middle of an answer would delay it by seconds. Page tables are last, so that no other section's
place depends on their length.

A captured graph reads fixed addresses, so its sections have the size of its bucket. Rows beyond the
real ones are padding (position and slot -1), which kernels skip: some after the rows that attend by
themselves, some after those of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from pagemesh.engine.cuda.launches import Launch, StepRows
from pagemesh.kernels.ops import RaggedBatch
from pagemesh.kernels.paged_prefill.blocks import BLOCK_WORDS, with_contexts

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
_ALIGNED_WORDS = 4


@dataclass(frozen=True, slots=True)
class RowsShape:
    """How large each section is, in entries."""

    rows: int
    sequences: int
    blocks: int
    wanted: int
    pages: int

    @property
    def words(self) -> int:
        """int32 words of all sections and the gaps between them."""
        _, start, size = self.sections()[-1]
        return start + size

    def sections(self) -> tuple[tuple[str, int, int], ...]:
        """Name, start and size of each section in order, the latter two in words."""
        sizes = (
            ("slots", 2 * self.rows),
            ("tokens", self.rows),
            ("position", self.rows),
            ("sequence", self.rows),
            ("indptr", self.sequences + 1),
            ("blocks", BLOCK_WORDS * self.blocks),
            ("wanted", self.wanted),
            ("tables", self.pages),
        )
        found, start = [], 0
        for name, size in sizes:
            found.append((name, start, size))
            start += -(-size // _ALIGNED_WORDS) * _ALIGNED_WORDS
        return tuple(found)


@dataclass(frozen=True, slots=True)
class AloneRows:
    """Rows of one launch, each by itself: their ``part`` of all rows, their ``batch``, and how many
    ``spans`` there is room for."""

    part: slice
    batch: RaggedBatch
    spans: int


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The sections as tensors on the device. ``batch`` is for kernels only: its ``row_indptr`` just
    repeats ``table_indptr``, since no kernel reads it. Rows that are in no part of ``alone`` are in
    ``blocks``."""

    tokens: torch.Tensor
    batch: RaggedBatch
    blocks: torch.Tensor
    wanted: torch.Tensor
    alone: tuple[AloneRows, ...]


def exact_shape(batch: RaggedBatch, wanted_count: int, block_count: int) -> RowsShape:
    """Sections without padding."""
    return RowsShape(batch.rows, batch.sequences, block_count, wanted_count, batch.tables.shape[0])


def pack(
    shape: RowsShape,
    tokens: torch.Tensor,
    batch: RaggedBatch,
    wanted: torch.Tensor,
    split: StepRows,
    *,
    prompts_from: int | None = None,
) -> I32:
    """int32 ``[shape.words]``, on the host. ``tokens``: int64 [rows]; ``wanted``: int64 [n], rows
    of the batch; ``prompts_from``: the row at which those of prompts begin, after those that attend
    by themselves and their padding; None: without padding between them.

    Raises ``ValueError`` when the step does not fit into ``shape``.
    """
    by_row = [tokens, batch.row_position, batch.row_sequence, batch.slots]
    token, position, sequence, slots = (values.numpy() for values in by_row)
    at, order = wanted.numpy(), split.order
    if order is not None:
        token, position, sequence, slots = (
            values[order] for values in (token, position, sequence, slots)
        )
        at = np.argsort(order)[at]
    indptr, alone = batch.table_indptr.numpy(), split.alone_count
    blocks = with_contexts(split.blocks, position, sequence, indptr)
    gap = prompts_from - alone if prompts_from is not None and len(blocks) else 0
    if gap:
        at = np.where(at < alone, at, at + gap)
        blocks[:, :2] += gap

    def spread(values: NDArray[np.integer], rest: int) -> NDArray[np.integer]:
        return np.insert(values, alone, np.full(gap, rest)) if gap else values

    parts: dict[str, tuple[NDArray[np.integer], int, str]] = {
        "slots": (spread(slots, -1), -1, "rows"),
        "tokens": (spread(token, 0), 0, "rows"),
        "position": (spread(position, -1), -1, "rows"),
        "sequence": (spread(sequence, 0), 0, "rows"),
        "indptr": (indptr, 0, "sequences"),
        "blocks": (blocks.reshape(-1), 0, "blocks"),
        "wanted": (at, 0, "wanted rows"),
        "tables": (batch.tables.numpy(), 0, "pages"),
    }
    words = np.zeros(shape.words, np.int32)
    for name, start, size in shape.sections():
        values, rest, what = parts[name]
        section = words[start : start + size]
        fill(section.view(np.int64) if name == "slots" else section, values, rest, what)
    return words


def fill(out: I32 | I64, values: NDArray[np.integer], rest: int, what: str) -> None:
    """Put ``values`` at the beginning of ``out`` and fill the remainder with ``rest``. Raises
    ``ValueError`` when ``values`` do not fit."""
    if len(values) > len(out):
        raise ValueError(f"{len(values)} {what} in a step with room for {len(out)}")
    out[: len(values)] = values
    out[len(values) :] = rest


def unpack(shape: RowsShape, words: torch.Tensor, launches: Sequence[Launch]) -> DeviceRows:
    """Views of ``words``, int32 ``[shape.words]``, by section; ``launches`` are those of the rows
    that attend by themselves."""
    part = {name: words[start : start + size] for name, start, size in shape.sections()}
    batch = RaggedBatch(
        tables=part["tables"],
        table_indptr=part["indptr"],
        row_indptr=part["indptr"],
        row_sequence=part["sequence"],
        row_position=part["position"],
        slots=part["slots"].view(torch.int64),
    )
    alone = tuple(_alone(batch, launch) for launch in launches)
    return DeviceRows(
        part["tokens"], batch, part["blocks"].view(-1, BLOCK_WORDS), part["wanted"], alone
    )


def _alone(batch: RaggedBatch, launch: Launch) -> AloneRows:
    part = slice(launch.first, launch.end)
    own = replace(
        batch,
        row_sequence=batch.row_sequence[part],
        row_position=batch.row_position[part],
        slots=batch.slots[part],
    )
    return AloneRows(part, own, launch.spans)
