"""A model folder with random weights, for every server of a comparison: speed needs no training.

    python -m ops.bench.serving.random_model S FOLDER

S, M and L as in ``ops/bench/random_models.py``, float32, in Hugging Face's format, with a
byte-level tokenizer trained on the Python files of the standard library. Its generation
configuration has no end-of-sequence token, so that nothing stops early.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from ops.bench.random_models import CONTEXT_TOKENS_MAX, HEAD_DIM, SHAPES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

_END, _TURN, _TURN_END = "<|end|>", "<|turn|>", "<|turn_end|>"
_TEMPLATE = (
    "{% for message in messages %}"
    "<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|turn_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
_NO_TOKEN = -1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    save(arguments.name, arguments.folder)
    print(f"{arguments.name} is in {arguments.folder}")


def save(name: str, folder: Path) -> None:
    """Write model ``name``, one of ``SHAPES``, to ``folder``."""
    shape = SHAPES[name]
    torch.manual_seed(0)
    sizes = {
        "vocab_size": shape.vocab_tokens,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.layer_count,
        "num_attention_heads": shape.head_count,
        "num_key_value_heads": shape.kv_head_count,
        "intermediate_size": shape.mlp_size,
        "max_position_embeddings": CONTEXT_TOKENS_MAX,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_base},
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    model = (
        Qwen2ForCausalLM(Qwen2Config(**sizes))
        if shape.qkv_bias
        else LlamaForCausalLM(LlamaConfig(**sizes, head_dim=HEAD_DIM))
    )
    model.save_pretrained(folder)
    train_tokenizer(shape.vocab_tokens).save_pretrained(folder)
    generation = folder / "generation_config.json"
    settings = json.loads(generation.read_text()) | {"eos_token_id": [_NO_TOKEN]}
    generation.write_text(json.dumps(settings, indent=2) + "\n")


def train_tokenizer(vocab_tokens: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of at most ``vocab_tokens``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_tokens,
        special_tokens=[_END, _TURN, _TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=_END, eos_token=_END, pad_token=_END
    )
    fast.chat_template = _TEMPLATE
    return fast


def _texts() -> Iterator[str]:
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        if "site-packages" not in file.parts:
            yield file.read_text(encoding="utf-8", errors="replace")


if __name__ == "__main__":
    main()
