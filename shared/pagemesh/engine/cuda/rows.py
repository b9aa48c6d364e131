"""A step's rows on the device, in one transfer.

All integers of a step go through one array of int32, cut into sections:

    slots       2 * rows      int64, as two words each (first, so that they are aligned)
    tokens      rows
    position    rows
    sequence    rows
    indptr      sequences + 1 where each sequence's page table starts
    blocks      2 * blocks    see ``paged_prefill.row_blocks``; none where a step only decodes
    wanted      wanted        rows whose hidden states are asked for
    tables      pages         page tables, joined

A captured graph reads fixed addresses, so its sections have the size of its bucket: rows
beyond the real ones are padding (position and slot -1), which kernels skip.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pagemesh.kernels.ops import RaggedBatch

I32 = NDArray[np.int32]


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
        """int32 words of all sections."""
        return sum(size for _, size in self.sections())

    def sections(self) -> tuple[tuple[str, int], ...]:
        """Each section and its words, in order."""
        return (
            ("slots", 2 * self.rows),
            ("tokens", self.rows),
            ("position", self.rows),
            ("sequence", self.rows),
            ("indptr", self.sequences + 1),
            ("blocks", 2 * self.blocks),
            ("wanted", self.wanted),
            ("tables", self.pages),
        )


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The sections as tensors on the device; ``batch`` is for kernels only (its ``row_indptr``
    is the table's, which none of them reads)."""

    tokens: torch.Tensor
    batch: RaggedBatch
    blocks: torch.Tensor
    wanted: torch.Tensor


def exact_shape(batch: RaggedBatch, wanted_count: int, block_count: int) -> RowsShape:
    """Sections without padding."""
    return RowsShape(batch.rows, batch.sequences, block_count, wanted_count, batch.tables.shape[0])


def pack(
    shape: RowsShape, tokens: torch.Tensor, batch: RaggedBatch, wanted: torch.Tensor, blocks: I32
) -> I32:
    """int32 ``[shape.words]``, on the host. ``tokens``: int64 [rows]; ``wanted``: int64 [n].

    Raises ``ValueError`` when the step does not fit into ``shape``.
    """
    slots = np.full(shape.rows, -1, np.int64)
    fill(slots, batch.slots.numpy(), "rows")
    parts = {
        "slots": slots.view(np.int32),
        "tokens": padded(tokens.numpy(), shape.rows, 0, "rows"),
        "position": padded(batch.row_position.numpy(), shape.rows, -1, "rows"),
        "sequence": padded(batch.row_sequence.numpy(), shape.rows, 0, "rows"),
        "indptr": padded(batch.table_indptr.numpy(), shape.sequences + 1, 0, "sequences"),
        "blocks": padded(blocks.reshape(-1), 2 * shape.blocks, 0, "blocks"),
        "wanted": padded(wanted.numpy(), shape.wanted, 0, "wanted rows"),
        "tables": padded(batch.tables.numpy(), shape.pages, 0, "pages"),
    }
    return np.concatenate([parts[name] for name, _ in shape.sections()])


def padded(values: NDArray[np.integer], count: int, rest: int, what: str) -> I32:
    """int32 [count]: ``values``, then ``rest``. Raises ``ValueError`` for more than that."""
    out = np.full(count, rest, np.int32)
    fill(out, values, what)
    return out


def fill(out: NDArray[np.integer], values: NDArray[np.integer], what: str) -> None:
    """Put ``values`` at the beginning of ``out``. Raises ``ValueError`` when they are more."""
    if len(values) > len(out):
        raise ValueError(f"{len(values)} {what} in a step with room for {len(out)}")
    out[: len(values)] = values


def unpack(shape: RowsShape, words: torch.Tensor) -> DeviceRows:
    """Views of ``words``, int32 ``[shape.words]``, by section."""
    sizes = [size for _, size in shape.sections()]
    names = [name for name, _ in shape.sections()]
    part = dict(zip(names, torch.split(words, sizes), strict=True))
    batch = RaggedBatch(
        tables=part["tables"],
        table_indptr=part["indptr"],
        row_indptr=part["indptr"],
        row_sequence=part["sequence"],
        row_position=part["position"],
        slots=part["slots"].view(torch.int64),
    )
    return DeviceRows(part["tokens"], batch, part["blocks"].view(-1, 2), part["wanted"])
