"""A tiny random checkpoint of each architecture that the fallback is tested with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tests.unit.engine.models import VOCAB, randomised
from transformers import PreTrainedConfig

_WINDOW_TOKENS = 24
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "sliding_window": _WINDOW_TOKENS, "query_pre_attn_scalar": 20,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512, "n_inner": 112,
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "BertLMHeadModel": {"is_decoder": True},
    # With the default of six sliding layers to a full one, four layers would have no full one.
    "Gemma3ForCausalLM": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "OPTForCausalLM": {"ffn_dim": 112, "word_embed_proj_dim": 32},
}
"""What an architecture needs beyond the common shape."""


def fallback_config(architecture: str, **changes: Any) -> PreTrainedConfig:
    """A tiny configuration of ``architecture``: those fields of the common shape that it has."""
    kind = getattr(transformers, architecture).config_class
    known = kind()
    fields = {name: value for name, value in _SHAPE.items() if hasattr(known, name)}
    config: PreTrainedConfig = kind(**(fields | _OWN.get(architecture, {}) | changes))
    return config


def save_fallback_twin(
    folder: Path, architecture: str, *, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """Write a random checkpoint to ``folder``; returns its model in float32, with the eager
    attention of ``transformers``."""
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(fallback_config(architecture, **changes)).eval()
    randomised(model).to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    model = model.float()
    model.set_attn_implementation("eager")
    return model
