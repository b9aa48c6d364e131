"""A model folder just large enough for start-up checks: a configuration and a tokenizer file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2_048, "vocab_size": 300,
}  # fmt: skip


def write_model_files(folder: Path, **fields: Any) -> Path:
    """Write the files to ``folder``, with the configuration changed by ``fields``."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | fields))
    (folder / "tokenizer.json").write_text("{}")
    return folder
