"""A tiny model with random weights that a whole mesh can serve within seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.unit.gateway.support import END, TEMPLATE, byte_tokenizer

CONTEXT_TOKENS = 2_048


def write_tiny_llama(folder: Path, *, seed: int = 0, **shape: int) -> Path:
    """Write a Hugging Face folder: Llama shape, byte-level tokenizer, chat template, safetensors.
    ``shape``: fields of the configuration to change."""
    from transformers import LlamaConfig

    return _write(folder, LlamaConfig(**(_shape() | shape)), seed)


def write_tiny_gemma2(folder: Path, *, window_tokens: int, seed: int = 0) -> Path:
    """The same in the shape of Gemma 2: every other layer has a window of ``window_tokens``, and
    scores and logits are capped low enough to have an effect."""
    from transformers import Gemma2Config

    config = Gemma2Config(
        **_shape(), head_dim=16, query_pre_attn_scalar=16, sliding_window=window_tokens,
        attn_logit_softcapping=4.0, final_logit_softcapping=10.0,
    )  # fmt: skip
    return _write(folder, config, seed)


def _shape() -> dict[str, Any]:
    tokenizer = byte_tokenizer()
    end = tokenizer.token_to_id(END)
    return {
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_TOKENS, "initializer_range": 0.3,
        "bos_token_id": end, "eos_token_id": end, "tie_word_embeddings": True,
    }  # fmt: skip


def _write(folder: Path, config: Any, seed: int) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    words = {"eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder
