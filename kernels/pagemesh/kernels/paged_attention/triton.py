"""``paged_attention`` on a GPU: the context in spans, then ``merge_states``.

One program takes one row, one KV head and one span of ``SPAN_TOKENS`` positions, or a part of a
span, down to a quarter, when there are few. The query heads that share the KV head are the rows of
its matrix products, so K and V are read once for all of them (Flash-Decoding, Dao et al., 2023; the
online softmax is that of Milakov and Gimelshein, 2018).

A row at a position below 0 is padding: its result is 0.

How products are computed, and so how exact they are, follows from the types (``tiles``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagemesh.kernels.batch import WINDOW_TOKENS_MAX, RaggedBatch
from pagemesh.kernels.kv_pool import KvPool
from pagemesh.kernels.merge_states.triton import merge_states
from pagemesh.kernels.paged_attention import check_limits, check_sharing
from pagemesh.kernels.paged_attention.tiles import Product, Tile, decode_tile, product_of
from pagemesh.kernels.quantise.triton import numbers_of
from pagemesh.kernels.triton_support import (
    PageShape,
    dot_type,
    elements_to_read,
    expect_heads,
    expect_integers,
    has_e4m3,
    is_interpreted,
    page_shape,
)

SPAN_TOKENS = 256
PIECES_MAX = 4
"""Pieces of a span, of which each program takes one or several. A program goes through its blocks
one after the other, at a microsecond each, even if the rest of the device is idle."""
_PIECE_TOKENS = tl.constexpr(SPAN_TOKENS // PIECES_MAX)
_PROGRAMS_MAX = 1024
"""Programs that keep a device busy, idle ones included: spans are not cut into more than this."""
SEES_ALL = tl.constexpr(0)
"""Every row sees all positions of the block."""
SEES_SOME = tl.constexpr(1)
"""Every row has seen at least one position by the end of the block."""
SEES_MAYBE_NONE = tl.constexpr(2)
"""Rows may have seen no position by the end of the block."""
_WINDOW_MAX = 2**31 - 1
"""Positions are int32: a larger window hides none of them, and does not fit into their type."""
_LN2 = math.log(2.0)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """A compile-time constant: what an attention kernel is compiled for. ``scale`` is in base 2,
    since the hardware's instruction is ``exp2``."""

    page: PageShape
    group: int
    """Query heads that share a KV head."""
    rows: int
    """Rows of the matrix products; a power of two, at least 16."""
    block: int
    """Positions taken at a time; a power of two."""
    chunk: int
    """Dimensions of a head whose queries are held (``Tile.chunk``); a power of two."""
    page_run: int
    """How many successive positions of an aligned block are sure to lie in one page."""
    scale: float
    window: int
    """Positions a row sees, itself included; 0: all before it."""
    soft_cap: float
    """Scores are soft-capped to plus and minus this (base 2); 0: no cap."""
    dot: tl.dtype
    """The type in which queries and K are multiplied."""
    mix: tl.dtype
    """The type of weights and V."""
    product: Product


def attention_shape(
    q: torch.Tensor, pool: KvPool, tile: Tile, *, scale: float, window_tokens: int, soft_cap: float
) -> AttentionShape:
    """Products are computed in the pages' type, or in that of ``q`` where pages have codes. But
    weights that are multiplied by the scales of codes are never float16, in which a small weight
    times the scale of a small value would be 0. Raises ``ValueError`` when the heads of ``q``
    cannot share the pool's, or for a cap or window that is not allowed."""
    at = pool.layout
    check_sharing(q.shape[1], pool)
    check_limits(soft_cap, window_tokens)
    group = q.shape[1] // at.kv_heads
    page = page_shape(at)
    factors = q.dtype if at.is_scaled else pool.keys(0).dtype
    is_narrow = at.is_scaled and factors is torch.float16
    return AttentionShape(
        page=page,
        group=group,
        rows=tile.rows,
        block=tile.block,
        chunk=min(tile.chunk, page.block_dim),
        page_run=math.gcd(at.page_size, tile.block),
        scale=scale / _LN2,
        window=window_tokens if window_tokens <= _WINDOW_MAX else 0,
        soft_cap=soft_cap / _LN2 if soft_cap < math.inf else 0.0,
        dot=dot_type(factors),
        mix=dot_type(torch.bfloat16 if is_narrow else factors),
        product=product_of(q.dtype, at.dtype),
    )


@triton.jit
def pages_of(table, index, low, end, at: tl.constexpr):
    """int32 [block]: the page of each position of block ``index``, loaded once per page where pages
    and blocks are aligned; 0, without a load, for pages without a position in ``low`` to ``end``
    (exclusive)."""
    start = index * at.block
    page = tl.full([at.block], 0, tl.int32)
    n = tl.arange(0, at.block)
    if at.page_run == min(at.page.page_size, at.block):
        for run in tl.static_range(at.block // at.page_run):
            first = start + run * at.page_run
            there = (first < end) & (first + at.page_run > low)
            one = tl.load(table + first // at.page.page_size, mask=there, other=0)
            page = tl.where(n // at.page_run == run, one, page)
    else:  # a page may begin anywhere in a block
        number = (start + n) // at.page.page_size
        there = (number * at.page.page_size < end) & ((number + 1) * at.page.page_size > low)
        page = tl.load(table + number, mask=there, other=0)
    return page


@triton.jit
def load_keys(pages, own, n, end, part: tl.constexpr, at: tl.constexpr):
    """K of positions ``n``, dimensions from ``part * at.chunk`` on: [chunk, block]. Positions from
    ``end`` on in the last page are loaded too: a mask that cuts through a page would make each
    element a load of its own, and ``seen`` hides those scores anyway."""
    kind: tl.constexpr = at.page.kind
    d = part * at.chunk + tl.arange(0, at.chunk)
    at_k = own + n % at.page.page_size
    kept = ((n // at.page.page_size) * at.page.page_size < end)[None, :]
    if at.page.head_dim < at.page.block_dim:
        kept = kept & (d < at.page.head_dim)[:, None]
    at_k = at_k[None, :] + (d * at.page.page_size)[:, None]
    return numbers_of(tl.load(pages + at_k, mask=kept, other=0.0), kind).to(at.dot)


@triton.jit
def load_values(pages, own, n, low, end, at: tl.constexpr):
    """V of positions ``n``, [block, block_dim]; 0 before ``low`` and from ``end`` on, where
    memory may hold NaN."""
    kind: tl.constexpr = at.page.kind
    d = tl.arange(0, at.page.block_dim)
    at_v = own + at.page.value_offset + (n % at.page.page_size) * at.page.head_dim
    kept = (n < end)[:, None]
    if at.window > 0:
        kept = kept & (n >= low)[:, None]
    if at.page.head_dim < at.page.block_dim:
        kept = kept & (d < at.page.head_dim)[None, :]
    at_v = at_v[:, None] + d[None, :]
    return numbers_of(tl.load(pages + at_v, mask=kept, other=0.0), kind).to(at.mix)


@triton.jit
def load_queries(heads, own_rows, part: tl.constexpr, at: tl.constexpr):
    """Dimensions from ``part * at.chunk`` on of the query heads at ``heads`` [rows], [rows,
    chunk]; 0 for rows that are not the program's own."""
    d = part * at.chunk + tl.arange(0, at.chunk)
    kept = own_rows[:, None]
    if at.page.head_dim < at.page.block_dim:
        kept = kept & (d < at.page.head_dim)[None, :]
    return tl.load(heads[:, None] + d[None, :], mask=kept, other=0.0).to(at.dot)


@triton.jit
def load_scales(pages, own, n, low, end, at: tl.constexpr):
    """float32 [block]: the scales behind the codes at ``own``; 0 before ``low`` and from
    ``end`` on."""
    scales = (pages + own + at.page.scale_offset).to(tl.pointer_type(tl.float32), bitcast=True)
    return tl.load(scales + n % at.page.page_size, mask=(n >= low) & (n < end), other=0.0)


@triton.jit
def capped(scores, at: tl.constexpr):
    """``scores`` (base 2), soft-capped if there is a cap."""
    if at.soft_cap > 0.0:
        # tanh by exp2: no library is needed for it, and it saturates where exp2 overflows.
        raised = tl.exp2(scores * (2.0 * 1.4426950408889634 / at.soft_cap))
        scores = at.soft_cap - (2.0 * at.soft_cap) / (raised + 1.0)
    return scores


@triton.jit
def upper_part(x):
    """float32 ``x`` without its 13 lowest bits, which a tf32 instruction ignores."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def add_product(a, b, total, at: tl.constexpr):
    """``total`` plus the matrix product of ``a``, queries or weights, and ``b``, K or V."""
    if at.product == "tf32x3":
        total = tl.dot(a, b, total, input_precision="tf32x3")
    elif at.product == "tf32x2":  # b are codes, which tf32 holds exactly
        upper = upper_part(a)
        total = tl.dot(a - upper, b, total, input_precision="tf32")
        total = tl.dot(upper, b, total, input_precision="tf32")
    elif at.product == "tf32":
        # The instruction would cut off the same bits. But sm_90 wants its second factor transposed,
        # and one that goes through registers is transposed there, not loaded word by word.
        total = tl.dot(upper_part(a), upper_part(b), total, input_precision="tf32")
    else:
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def scores_of(queries, pages, own, n, index, end, at: tl.constexpr):
    """float32 [rows, block], unscaled: ``queries`` with K of the positions ``n`` of block
    ``index``."""
    q, heads, own_rows = queries
    scores = tl.full([at.rows, at.block], 0.0, tl.float32)
    if at.chunk == at.page.block_dim:
        scores = add_product(q, load_keys(pages, own, n, end, 0, at), scores, at)
    else:
        # Always 0, but the compiler cannot know: if it saw that queries are the same for each
        # block, it would load them once, and hold them in more registers than there are.
        nothing = tl.multiple_of(tl.minimum(end, 0) * index, 16)
        for part in tl.static_range(at.page.block_dim // at.chunk):
            q = load_queries(heads + nothing, own_rows, part, at)
            scores = add_product(q, load_keys(pages, own, n, end, part, at), scores, at)
    return scores


@triton.jit
def attend_block(
    queries, pages, table, head, index, low, end, first, last, state, at: tl.constexpr,
    sees: tl.constexpr,
):  # fmt: skip
    """Add the positions of block ``index`` to ``state``. Those from ``low`` to ``end`` (exclusive)
    are in pages. Unless ``sees`` is ``SEES_ALL``, a row only attends to positions ``first`` to
    ``last`` (inclusive; [rows, 1] or a number).

    ``queries`` are the queries of the first chunk of dimensions, where each row's head begins, and
    which rows are the program's own. The state is highest score, sum, mixed values and the
    pages of this block. Those of the next block are loaded here, so that the loads of K and V
    never wait for a page table."""
    top, total, mixed, page = state
    run: tl.constexpr = at.page_run
    n = index * at.block + tl.arange(0, at.block)
    own = tl.max_constancy(page.to(tl.int64), run) * at.page.page_stride
    own += head * at.page.head_stride
    scores = scores_of(queries, pages, own, n, index, end, at)
    if at.page.kind != "float":
        scores *= load_scales(pages, own, n, low, end, at)[None, :]
    scores = capped(scores * at.scale, at)
    if sees != SEES_ALL:
        seen = (n[None, :] >= first) & (n[None, :] <= last)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = higher
    if sees == SEES_MAYBE_NONE or at.window > 0:  # -inf - -inf is NaN
        base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    old = tl.exp2(top - base)
    total = total * old + tl.sum(weights, 1)
    if at.page.kind != "float":
        weights *= load_scales(pages, own + at.page.value_offset, n, low, end, at)[None, :]
    v = load_values(pages, own, n, low, end, at)
    mixed = add_product(weights.to(at.mix), v, mixed * old[:, None], at)
    return higher, total, mixed, pages_of(table, index + 1, low, end, at)


@triton.jit
def no_state(table, index, low, end, at: tl.constexpr):
    """The state, before block ``index``, of rows that have seen nothing."""
    top = tl.full([at.rows], float("-inf"), tl.float32)
    total = tl.full([at.rows], 0.0, tl.float32)
    mixed = tl.full([at.rows, at.page.block_dim], 0.0, tl.float32)
    return top, total, mixed, pages_of(table, index, low, end, at)


@triton.jit(do_not_specialize=["pieces_each"])
def _attend_span(
    q, pages, tables, table_indptr, row_sequence, row_position, states, lse, q_stride,
    pieces_each, at: tl.constexpr,
):  # fmt: skip
    row, head, span = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    m = tl.arange(0, at.rows)
    d = tl.arange(0, at.page.block_dim)
    own_heads = m < at.group
    query_heads = head * at.group + m
    part = (row * at.page.kv_heads * at.group + query_heads) * tl.num_programs(2) + span
    end = tl.load(row_position + row) + 1
    first = 0
    if at.window > 0:
        first = tl.maximum(end - at.window, 0)
    low = tl.maximum(span * _PIECE_TOKENS * pieces_each, first)
    high = tl.minimum((span * _PIECE_TOKENS + _PIECE_TOKENS) * pieces_each, end)
    if low >= high:
        tl.store(lse + part, tl.full([at.rows], float("-inf"), tl.float32), mask=own_heads)
        return
    table = tables + tl.load(table_indptr + tl.load(row_sequence + row))
    kept = own_heads[:, None] & (d < at.page.head_dim)[None, :]
    heads = q + row * q_stride + query_heads * at.page.head_dim
    queries = load_queries(heads, own_heads, 0, at), heads, own_heads
    state = no_state(table, low // at.block, low, high, at)
    # Counts blocks rather than positions: the compiler has to see that a block begins at a multiple
    # of its size, or it loads K element by element.
    for index in range(low // at.block, (high + at.block - 1) // at.block):
        state = attend_block(
            queries, pages, table, head, index, low, high, low, high - 1, state, at, SEES_SOME
        )
    top, total, mixed, _ = state
    at_state = part[:, None] * at.page.head_dim + d[None, :]
    tl.store(states + at_state, mixed / total[:, None], mask=kept)
    tl.store(lse + part, (top + tl.log2(total)) * 0.6931471805599453, mask=own_heads)


def pieces_of(spans: int) -> int:
    """Programs per span of a launch with room for ``spans`` (row, KV head, span) triples."""
    if is_interpreted():
        return 1  # the interpreter runs one program after the other
    pieces = PIECES_MAX
    while pieces > 1 and pieces * spans > _PROGRAMS_MAX:
        pieces //= 2
    return pieces


def span_count(tokens_max: int) -> int:
    """Spans that a context of ``tokens_max`` positions needs."""
    return max(-(-tokens_max // SPAN_TOKENS), 1)


def paged_attention(
    q: torch.Tensor,
    pool: KvPool,
    layer: int,
    batch: RaggedBatch,
    scale: float,
    out: torch.Tensor | None = None,
    *,
    soft_cap: float = math.inf,
    window_tokens: int = WINDOW_TOKENS_MAX,
    spans: int | None = None,
) -> torch.Tensor:
    """See the package; q and out may be float32, float16 or bfloat16. ``spans``: at least
    ``span_count`` of the longest context; if it is not given, it is read from the device, which
    waits for the device. Raises ``ValueError``."""
    heads, head_dim, rows = q.shape[1], pool.layout.head_dim, batch.rows
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    for name, given in (("q", q), ("out", out)):
        expect_heads(name, given, rows_count=rows, head_dim=head_dim)
    expect_integers("row_position", batch.row_position, torch.int32, rows)
    group = max(heads // pool.layout.kv_heads, 1)
    tile = decode_tile(q.dtype, pool.layout, group, has_e4m3=has_e4m3())
    at = attention_shape(q, pool, tile, scale=scale, window_tokens=window_tokens, soft_cap=soft_cap)
    if not rows:
        return out
    if spans is None:
        spans = span_count(int(batch.row_position.max()) + 1)
    pieces = pieces_of(rows * pool.layout.kv_heads * spans)
    parts = pieces * spans
    states = torch.empty((rows, heads, parts, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((rows, heads, parts), dtype=torch.float32, device=q.device)
    _attend_span[(rows, pool.layout.kv_heads, parts)](
        q, elements_to_read(pool, layer), batch.tables, batch.table_indptr, batch.row_sequence,
        batch.row_position, states, lse, q.stride(0), PIECES_MAX // pieces, at,
        num_warps=tile.warps,
        num_stages=min(tile.stages, 2) if at.window or at.soft_cap else tile.stages,
    )  # fmt: skip
    return merge_states(states, lse, out)
