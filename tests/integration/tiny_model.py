"""A tiny model with random weights that a whole mesh can serve within seconds."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.gateway.support import END, TEMPLATE, byte_tokenizer

CONTEXT_TOKENS = 2_048


def write_tiny_llama(folder: Path, *, seed: int = 0) -> Path:
    """A Hugging Face folder: Llama shape, byte-level tokenizer, chat template, safetensors."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    end = tokenizer.token_to_id(END)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS, initializer_range=0.3,
        bos_token_id=end, eos_token_id=end, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {"eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder
