"""What CUDA graphs and draws take of a device's memory, before there are any. Without torch, for
those that only plan.
"""

from __future__ import annotations

GRAPH_COUNT_MAX = 96
"""Captured at once."""
ROWS_MAX = 256
"""Of a step that is captured, by themselves."""
ROWS_BESIDE_MIN = 8
"""What a step that has prompts too is captured for at least."""
CHUNK_ROWS_MAX = 768
"""Of prompts in a step that is captured: more are in none by default, and keep a device busy while
the host launches them."""
PROMPTS_MAX = 16
"""Prompts in a step that is captured."""
STATES_BYTES_MAX = 128 << 20
"""What attention may keep of a launch's spans until they are merged."""
DRAW_ELEMENTS_MAX = 1 << 24
"""Logits that tokens are drawn from at a time."""
CONTEXT_BYTES = 512 << 20
"""Of a process on a device, before it has allocated anything: assumed."""
_DRAW_BYTES = 48
"""A logit: copies, ids, running sums and what a sort takes, where a row has a limit. Assumed."""
_GRAPH_BYTES = 2 << 20
"""Of a graph's own, for its kernels and their arguments: assumed. On an H100 45 of a model of 24
layers took 66 MiB with all that they share."""
_LAYER_ROWS = 21
"""Rows as wide as the hidden state that are alive at once in a layer, its MLP's included: about
what the widest of the families that we know have."""


def rows_held(sequence_count_max: int) -> int:
    """For how many rows by themselves there is room: a power of two, since steps that have prompts
    too are captured for such numbers."""
    rows = min(max(sequence_count_max, ROWS_BESIDE_MIN), ROWS_MAX)
    return 1 << (rows - 1).bit_length()


def graph_bytes_max(
    *, sequence_count_max: int, vocab_tokens: int, hidden_size: int, item_bytes: int
) -> int:
    """At most what a worker's graphs take beside its weights and pages, page tables left out.

    ``sequence_count_max``: in a step; ``item_bytes``: of an activation. The logits are kept in
    float32, and once more as they come out of the product.
    """
    rows = rows_held(sequence_count_max)
    logits = (rows + PROMPTS_MAX) * vocab_tokens * (4 + item_bytes)
    # Twice: graphs have memory of their own, and what is tried before a capture takes as much.
    activations = 2 * (rows + CHUNK_ROWS_MAX) * hidden_size * item_bytes * _LAYER_ROWS
    return logits + activations + STATES_BYTES_MAX + GRAPH_COUNT_MAX * _GRAPH_BYTES


def context_bytes_max(
    *, sequence_count_max: int, context_tokens_max: int, page_size: int, head_dim: int
) -> int:
    """At most what goes with the length of contexts: the cosine and sine of every position, and the
    page tables that graphs read."""
    rotations = context_tokens_max * head_dim * 4
    sequences = rows_held(sequence_count_max) + PROMPTS_MAX
    return rotations + sequences * -(-context_tokens_max // page_size) * 4


def logits_bytes_beyond(*, sequence_count_max: int, vocab_tokens: int, item_bytes: int) -> int:
    """Of steps with more rows than any graph has: they are launched kernel by kernel."""
    rows = sequence_count_max if sequence_count_max > ROWS_MAX else 0
    return rows * vocab_tokens * (4 + item_bytes)


def draw_bytes_max(*, sequence_count_max: int, vocab_tokens: int) -> int:
    """At most what it takes to draw the tokens of a step."""
    logits = max(min(sequence_count_max * vocab_tokens, DRAW_ELEMENTS_MAX), vocab_tokens)
    return logits * _DRAW_BYTES
