"""Layers with a window are told, however a family's file says it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.cli.planning.test_shape import BASE, shape, transformers_config

from pagemesh.cli.planning.shape import read_shape


@pytest.mark.parametrize(
    ("fields", "windows", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 32}, 6, 32),
        ({"model_type": "mistral", "sliding_window": None}, 0, 0),
        ({"model_type": "mistral", "sliding_window": 128}, 0, 0),
        ({"model_type": "qwen2", "sliding_window": 32}, 0, 0),
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True,
          "max_window_layers": 4}, 2, 32),
        ({"model_type": "gemma2", "sliding_window": 32}, 3, 32),
        ({"model_type": "gemma3_text", "sliding_window": 32}, 5, 32),
        ({"layer_types": ["full_attention"] * 6, "sliding_window": 32}, 0, 0),
        ({"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 32}, 3, 32),
        ({"layer_types": ["chunked_attention"] * 5 + ["full_attention"],
          "attention_chunk_size": 64}, 5, 64),
        ({"model_type": "llama4_text", "no_rope_layers": []}, 5, 128),
        ({"model_type": "llama4_text", "attention_chunk_size": 64,
          "no_rope_layers": [1, 0, 1, 0, 1, 0]}, 3, 64),
        ({"model_type": "llama4_text", "attention_chunk_size": 64,
          "no_rope_layer_interval": 2}, 3, 64),
        ({"model_type": "llama4_text", "attention_chunk_size": None}, 0, 0),
        ({"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0, 1, 1]}, 0, 0),
        ({"model_type": "gpt_neo", "attention_layers": ["global", "local"] * 3}, 3, 128),
        ({"model_type": "gpt_neo", "attention_types": [[["global", "local"], 3]],
          "window_size": 32}, 3, 32),
        ({"model_type": "gpt_neo", "attention_types": [[["global"], 6]]}, 0, 0),
    ],
)  # fmt: skip
def test_layers_with_a_window_are_counted(
    fields: dict[str, Any], windows: int, window: int
) -> None:
    made = shape(num_key_value_heads=4, **fields)
    assert (made.window_layer_count, made.window_tokens) == (windows, window)


@pytest.mark.parametrize("fields", [{}, {"no_rope_layer_interval": 3}, {"num_hidden_layers": 7}])
def test_layers_that_look_back_within_a_chunk_are_those_of_transformers(
    fields: dict[str, Any],
) -> None:
    config = transformers_config("llama4_text", attention_chunk_size=64, **fields)
    made = read_shape(
        {**BASE, "model_type": "llama4_text", "attention_chunk_size": 64, **fields}, "llama4"
    )
    assert made.window_layer_count == config.layer_types.count("chunked_attention")
