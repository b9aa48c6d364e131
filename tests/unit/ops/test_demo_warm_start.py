"""The demo model's first weights already hold the two halves of copying."""

from __future__ import annotations

import pytest
import torch
from ops.demo_model.warm_start import set_copying_heads
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS = 60


@pytest.fixture(scope="module")
def attentions() -> tuple[torch.Tensor, ...]:
    """Attention of each layer, `[heads, tokens, tokens]`, over the same random tokens twice."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=192,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    set_copying_heads(model)
    once = torch.randperm(2000)[:TOKENS]
    with torch.inference_mode():
        found = model(input_ids=torch.cat([once, once])[None], output_attentions=True).attentions
    return tuple(layer[0] for layer in found)


@pytest.mark.parametrize(("head", "back"), [(0, 1), (1, 2)])
def test_a_head_of_the_first_layer_looks_back_by_its_distance(
    attentions: tuple[torch.Tensor, ...], head: int, back: int
) -> None:
    rows = torch.arange(10, 2 * TOKENS)
    hits = attentions[0][head, rows].argmax(dim=-1) == rows - back
    assert hits.float().mean() > 0.9


@pytest.mark.parametrize("head", [0, 2])
def test_a_head_of_the_second_layer_finds_what_came_next_last_time(
    attentions: tuple[torch.Tensor, ...], head: int
) -> None:
    rows = torch.arange(TOKENS + 10, 2 * TOKENS)
    hits = attentions[1][head, rows].argmax(dim=-1) == rows - TOKENS + 1
    assert hits.float().mean() > 0.5
