"""``paged_prefill`` on a GPU: chunks of consecutive positions, a block of rows at a time.

One program takes one KV head and a block of (row, query head) pairs of one sequence, or a part
of it where types or the head width leave room for fewer (``paged_attention.tiles``), and
goes through the context from its first position on: past pages and the chunk's own alike, since
the chunk's K and V are in their pages already. Only blocks of positions that reach into the
chunk are masked. (The tiling is that of FlashAttention-2, Dao, 2023.) Few rows make few programs,
however long their context is: then the context is split, as in ``paged_attention``.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from pagemesh.kernels.batch import WINDOW_TOKENS_MAX, RaggedBatch
from pagemesh.kernels.kv_pool import KvPool
from pagemesh.kernels.merge_states.triton import merge_states
from pagemesh.kernels.paged_attention.tiles import prefill_tile
from pagemesh.kernels.paged_attention.triton import (
    SEES_ALL,
    SEES_MAYBE_NONE,
    attend_block,
    attention_shape,
    load_queries,
    no_state,
)
from pagemesh.kernels.paged_prefill.blocks import BLOCK_WORDS, block_rows, row_blocks, with_contexts
from pagemesh.kernels.triton_support import (
    elements_to_read,
    expect_heads,
    expect_integers,
    has_e4m3,
    has_wide_products,
    is_interpreted,
)

_BLOCK_WORDS = tl.constexpr(BLOCK_WORDS)
SPLITS_MAX = 32
_SPLIT_TOKENS_MIN = tl.constexpr(256)
"""The fewest positions in a part of a context: merging a part takes as long as computing these."""
_PROGRAMS_MAX = 256
"""Two for each multiprocessor of a large GPU: fewer would leave it partly idle."""


@triton.jit(do_not_specialize=["first_of_all"])
def _attend_rows(
    q, pages, tables, blocks, out, states, lse, q_stride, out_stride, parts, first_of_all,
    at: tl.constexpr,
):  # fmt: skip
    block, head = blocks + _BLOCK_WORDS * (tl.program_id(0) // parts), tl.program_id(1)
    split, splits = tl.program_id(2), tl.num_programs(2)
    rows_each: tl.constexpr = at.rows // at.group
    skipped = tl.program_id(0) % parts * rows_each
    first_row = tl.load(block) + skipped
    end_row = tl.minimum(tl.load(block + 1), first_row + rows_each)
    if first_row >= end_row:
        return
    m = tl.arange(0, at.rows)
    d = tl.arange(0, at.page.block_dim)
    row = first_row + m // at.group
    query_head = head * at.group + m % at.group
    own_rows = row < end_row
    kept = own_rows[:, None] & (d < at.page.head_dim)[None, :]
    wide_row = row.to(tl.int64)
    heads = q + wide_row * q_stride + query_head * at.page.head_dim
    queries = load_queries(heads, own_rows, 0, at), heads, own_rows
    past, table = tl.load(block + 2) + skipped, tables + tl.load(block + 3)
    position = past + row - first_row
    end = past + end_row - first_row
    low = past * 0
    if at.window > 0:
        low = tl.maximum(past + 1 - at.window, 0)
    begin, all_end = low // at.block, (end + at.block - 1) // at.block
    each = tl.maximum((all_end - begin + splits - 1) // splits, _SPLIT_TOKENS_MIN // at.block)
    is_whole = all_end - begin <= each
    if is_whole and split > 0:
        return
    begin = tl.minimum(begin + split * each, all_end)
    own_end = tl.minimum(begin + each, all_end)
    state = no_state(table, begin, low, end, at)
    middle = begin
    if at.window == 0:
        # Up to here every row sees every position: nothing to mask.
        middle = tl.maximum(begin, tl.minimum((past + 1) // at.block, own_end))
        for index in range(begin, middle):
            state = attend_block(
                queries, pages, table, head, index, low, end, 0, end, state, at, SEES_ALL
            )
    last = position[:, None]
    first = last * 0
    if at.window > 0:
        first = last - at.window + 1
    for index in range(middle, own_end):
        state = attend_block(
            queries, pages, table, head, index, low, end, first, last, state, at, SEES_MAYBE_NONE
        )
    top, total, mixed, _ = state
    if is_whole:
        at_out = (wide_row * out_stride + query_head * at.page.head_dim)[:, None] + d[None, :]
        tl.store(out + at_out, mixed / total[:, None], mask=kept)
        if splits > 1:
            at_lse = ((wide_row - first_of_all) * at.page.kv_heads * at.group + query_head) * splits
            tl.store(lse + at_lse, float("inf"), mask=own_rows)
    else:
        at_lse = ((wide_row - first_of_all) * at.page.kv_heads * at.group + query_head) * splits
        at_lse += split
        at_state = at_lse[:, None] * at.page.head_dim + d[None, :]
        seen = total != 0  # a row sees nothing in a part that begins behind it
        tl.store(states + at_state, mixed / tl.where(seen, total, 1.0)[:, None], mask=kept)
        own_lse = (top + tl.log2(total)) * 0.6931471805599453
        tl.store(lse + at_lse, tl.where(seen, own_lse, float("-inf")), mask=own_rows)


def split_count(programs: int) -> int:
    """How many parts, one program each, to split contexts into when that many ``programs`` run
    without splitting."""
    if is_interpreted():
        return 1  # the interpreter runs one program after the other
    splits = 1
    while splits < SPLITS_MAX and 2 * splits * programs <= _PROGRAMS_MAX:
        splits *= 2
    return splits


def paged_prefill(
    q: torch.Tensor,
    pool: KvPool,
    layer: int,
    batch: RaggedBatch,
    scale: float,
    out: torch.Tensor | None = None,
    *,
    soft_cap: float = math.inf,
    window_tokens: int = WINDOW_TOKENS_MAX,
    blocks: torch.Tensor | None = None,
    first_row: int = 0,
) -> torch.Tensor:
    """See the package; q and out may be float32, float16 or bfloat16. ``blocks``: int32
    ``row_blocks`` ``with_contexts`` on the device; if not given, they are made from the batch,
    which waits for the device. Rows before ``first_row`` are in no block. Those at a position below
    0 may be in none: their result is 0 or what ``out`` held before. Raises ``ValueError``."""
    rows = batch.rows
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    for name, given in (("q", q), ("out", out)):
        expect_heads(name, given, rows_count=rows, head_dim=pool.layout.head_dim)
    expect_integers("row_position", batch.row_position, torch.int32, rows)
    group = max(q.shape[1] // pool.layout.kv_heads, 1)
    tile = prefill_tile(
        q.dtype, pool.layout, group, has_e4m3=has_e4m3(), has_wide_products=has_wide_products()
    )
    at = attention_shape(q, pool, tile, scale=scale, window_tokens=window_tokens, soft_cap=soft_cap)
    if blocks is None:
        made = with_contexts(
            row_blocks(batch.row_indptr.cpu().numpy(), at.group),
            batch.row_position.cpu().numpy(),
            batch.row_sequence.cpu().numpy(),
            batch.table_indptr.cpu().numpy(),
        )
        blocks = torch.from_numpy(made).to(q.device)
    if not len(blocks):
        return out
    rows_each, kv_heads = at.rows // at.group, pool.layout.kv_heads
    parts = triton.cdiv(block_rows(at.group), rows_each)
    splits = split_count(triton.cdiv(rows - first_row, rows_each) * kv_heads)
    # Empty if there is one part, but of the same type: else the kernel would be compiled again.
    shape = (rows - first_row if splits > 1 else 0, q.shape[1], splits)
    states = torch.empty((*shape, q.shape[2]), dtype=torch.float32, device=q.device)
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    _attend_rows[(len(blocks) * parts, kv_heads, splits)](
        q, elements_to_read(pool, layer), batch.tables, blocks, out, states, lse, q.stride(0),
        out.stride(0), parts, first_row, at, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        merge_states(states, lse, out[first_row:], batch.row_position[first_row:])
    return out
