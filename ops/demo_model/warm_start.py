"""Initial weights that can already copy from context.

Copying ("after `otter:` comes what came after it last time") needs two layers that work together:
one tells each token what preceded it, the next searches for that. Neither is useful without the
other, so from random weights, training stays on a plateau for thousands of steps. Here both are set
by hand, weakly; all other weights stay random, and everything is trained further.

    layer 0, head 0   attends one token back, writes what it saw into subspace `one_back`
    layer 0, head 1   attends two tokens back, writes into subspace `two_back`
    layer 1, head 0   looks for a token whose predecessor is the current token, and copies it
    layer 1, head 2   looks for a token whose last but one equals the current token's predecessor:
                      the value after `key:` if the current token is the `:`

After the induction heads of Olsson et al., "In-context Learning and Induction Heads", 2022.
"""

from __future__ import annotations

import math

import torch
from transformers import LlamaForCausalLM

FAST_PAIRS = 6  # rotary pairs of high frequency, which tell neighbours apart
SLOW_FROM = 18  # pairs from here on hardly rotate, so content in them matches at any distance
CONSTANT = 0.1  # the embedding component that all tokens share; others are about 0.02
SHARPNESS = 1.5  # the wanted neighbour wins by about five nats
WRITTEN = 0.06  # how strongly layer 0 writes what it attended to
COPIED = 0.3  # how strongly layer 1 writes what it copies
MATCH_PRESENT, MATCH_BEFORE = 2.4, 1.4  # a match wins by about nine nats


@torch.no_grad()
def set_copying_heads(model: LlamaForCausalLM) -> None:
    """Overwrite the heads named above; the model must still have its random initial weights."""
    width = model.config.head_dim
    basis = torch.linalg.qr(torch.randn(model.config.hidden_size, model.config.hidden_size - 1)).Q
    basis[0] = 0.0  # the shared component is not content
    one_back, two_back, content = basis[:, :width], basis[:, width : 2 * width], basis[:, -width:]
    model.model.embed_tokens.weight[:, 0] = CONSTANT
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    _look_back(model, first.q_proj.weight, first.k_proj.weight)
    first.v_proj.weight[:width] = content.T
    first.o_proj.weight[:, :width] = WRITTEN * one_back
    first.o_proj.weight[:, width : 2 * width] = WRITTEN * two_back
    heads = ((0, 0, content, one_back, MATCH_PRESENT), (2, 1, one_back, two_back, MATCH_BEFORE))
    for head, key_head, asked, offered, strength in heads:
        query = slice(head * width, (head + 1) * width)
        key = slice(key_head * width, (key_head + 1) * width)
        second.q_proj.weight[query] = _slow_rows(asked, strength)
        second.k_proj.weight[key] = _slow_rows(offered, strength)
        second.v_proj.weight[key] = content.T
        second.o_proj.weight[:, query] = COPIED * content


def _look_back(model: LlamaForCausalLM, queries: torch.Tensor, keys: torch.Tensor) -> None:
    """Heads 0 and 1 attend one and two tokens back.

    With rotary positions, a score is a sum of cosines of the distance. The component that all
    embeddings share gives a constant query and key; the query's phases set the position of the
    peak.
    """
    width = model.config.head_dim
    theta = model.config.rope_parameters["rope_theta"]
    keys[:width] = 0.0
    queries[: 2 * width] = 0.0
    for pair in range(FAST_PAIRS):
        frequency = theta ** (-2.0 * pair / width)
        keys[pair, 0] = SHARPNESS
        for head, back in enumerate((1, 2)):
            row = head * width + pair
            queries[row, 0] = SHARPNESS * math.cos(back * frequency)
            queries[row + width // 2, 0] = -SHARPNESS * math.sin(back * frequency)


def _slow_rows(subspace: torch.Tensor, strength: float) -> torch.Tensor:
    """A projection `[head_dim, hidden]` onto the subspace that uses only slow rotary pairs."""
    hidden, width = subspace.shape
    rows = torch.zeros(width, hidden)
    half, count = width // 2, width // 2 - SLOW_FROM
    rows[SLOW_FROM:half] = strength * subspace[:, :count].T
    rows[half + SLOW_FROM :] = strength * subspace[:, count : 2 * count].T
    return rows
