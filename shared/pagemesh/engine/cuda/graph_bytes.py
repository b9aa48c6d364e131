"""How much device memory CUDA graphs and draws will take. Without torch, for callers that only
plan.
"""

from __future__ import annotations

GRAPH_COUNT_MAX = 96
"""Graphs kept at once."""
ROWS_MAX = 256
"""Rows that attend by themselves in a captured step."""
ROWS_BESIDE_MIN = 8
"""The fewest such rows that a step with prompts beside them is captured for."""
CHUNK_ROWS_MAX = 768
"""Rows of prompts in a captured step. By default no step has more, and more would keep the device
busy while the host launches kernel by kernel."""
PROMPTS_MAX = 16
"""Prompts in a step that is captured."""
STATES_BYTES_MAX = 128 << 20
"""Partial results of a launch's spans, kept until they are merged."""
DRAW_ELEMENTS_MAX = 1 << 24
"""Logits that tokens are drawn from at a time."""
CONTEXT_BYTES = 512 << 20
"""What a process takes on a device before it has allocated anything. Assumed."""
_DRAW_BYTES = 48
"""Per logit: copies, ids, running sums and, where a row has a limit, a sort. Assumed."""
_GRAPH_BYTES = 2 << 20
"""A graph's own memory, for its kernels and their arguments. Assumed: on an H100, 45 graphs of a
model of 24 layers took 66 MiB, with all that they share."""
_LAYER_ROWS = 21
"""Values alive at once in a layer, its MLP included, per row and in multiples of the hidden size:
about those of the widest supported family."""


def rows_held(sequence_count_max: int) -> int:
    """How many rows that attend by themselves there is room for: a power of two, since steps with
    prompts are captured for such numbers."""
    rows = min(max(sequence_count_max, ROWS_BESIDE_MIN), ROWS_MAX)
    return 1 << (rows - 1).bit_length()


def graph_bytes_max(
    *, sequence_count_max: int, vocab_tokens: int, hidden_size: int, item_bytes: int
) -> int:
    """An upper bound on what a worker's graphs take beside weights, pages and page tables.

    ``sequence_count_max``: in a step; ``item_bytes``: of an activation. The logits are kept in
    float32, and once more in the type of the matrix product.
    """
    rows = rows_held(sequence_count_max)
    logits = (rows + PROMPTS_MAX) * vocab_tokens * (4 + item_bytes)
    # Twice: graphs have memory of their own, and the trial run before a capture takes as much.
    activations = 2 * (rows + CHUNK_ROWS_MAX) * hidden_size * item_bytes * _LAYER_ROWS
    return logits + activations + STATES_BYTES_MAX + GRAPH_COUNT_MAX * _GRAPH_BYTES


def context_bytes_max(
    *, sequence_count_max: int, context_tokens_max: int, page_size: int, head_dim: int
) -> int:
    """An upper bound on what grows with the context length: the cosine and sine of every position,
    and the page tables that graphs read."""
    rotations = context_tokens_max * head_dim * 4
    sequences = rows_held(sequence_count_max) + PROMPTS_MAX
    return rotations + sequences * -(-context_tokens_max // page_size) * 4


def logits_bytes_beyond(*, sequence_count_max: int, vocab_tokens: int, item_bytes: int) -> int:
    """The logits of steps with more rows than any graph: they are launched kernel by kernel."""
    rows = sequence_count_max if sequence_count_max > ROWS_MAX else 0
    return rows * vocab_tokens * (4 + item_bytes)


def draw_bytes_max(*, sequence_count_max: int, vocab_tokens: int) -> int:
    """An upper bound on what drawing the tokens of a step takes."""
    logits = max(min(sequence_count_max * vocab_tokens, DRAW_ELEMENTS_MAX), vocab_tokens)
    return logits * _DRAW_BYTES
