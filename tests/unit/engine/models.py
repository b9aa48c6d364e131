"""Tiny random checkpoints of each supported architecture, and their ``transformers`` twins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 199
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def twins() -> dict[str, Any]:
    """Name -> configuration; each feature that distinguishes architectures occurs at least once."""
    return {
        "llama": LlamaConfig(**SHAPE),
        "llama-tied-biased": LlamaConfig(
            **SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
        ),
        "llama-rope3-wide-heads": LlamaConfig(**SHAPE, head_dim=32, rope_parameters=LLAMA3_ROPE),
        "llama-linear-rope-one-kv-head": LlamaConfig(
            **{**SHAPE, "num_key_value_heads": 1}, rope_parameters=LINEAR_ROPE
        ),
        "qwen2-bias": Qwen2Config(**SHAPE),
        "qwen2-tied-yarn": Qwen2Config(
            **SHAPE, tie_word_embeddings=True, rope_parameters=YARN_ROPE
        ),
        "qwen3-head-norm": Qwen3Config(**SHAPE, head_dim=24),
        "qwen3-tied-all-heads": Qwen3Config(
            **{**SHAPE, "num_key_value_heads": 4}, head_dim=16, tie_word_embeddings=True
        ),
        "mistral-wide-heads": MistralConfig(**SHAPE, head_dim=24, sliding_window=None),
        "phi3-fused": Phi3Config(**SHAPE, pad_token_id=0),
        "granite-factors-tied-biased": GraniteConfig(
            **SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
            embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.1,
            logits_scaling=8.0,
        ),
    }  # fmt: skip


def make_twin(config: Any, *, seed: int = 0) -> Any:
    """A ``transformers`` model with random weights, including norms and biases."""
    torch.manual_seed(seed)
    return randomised(AutoModelForCausalLM.from_config(config).eval())


def randomised(model: Any) -> Any:
    """``model`` with random parameters, so scaled that each of them affects the output."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                tensor.normal_(0, 0.3)
            else:
                tensor.normal_(0, 0.6 / tensor.shape[-1] ** 0.5)
    return model


def save_twin(
    folder: Path,
    config: Any,
    *,
    dtype: torch.dtype = torch.float32,
    edit_head: Callable[[torch.Tensor], None] = lambda head: None,
) -> Any:
    """Write a random checkpoint to ``folder``; returns the model in float32."""
    model = make_twin(config).to(dtype)
    with torch.no_grad():
        edit_head(model.lm_head.weight)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return model.float()
