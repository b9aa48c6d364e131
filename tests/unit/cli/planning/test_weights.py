"""What weights take is told of their files, with what a family leaves unsaid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.unit.cli.planning.test_memory import LLAMA_70B
from tests.unit.cli.planning.test_plan_command import as_json

from pagemesh.cli.planning.shape import read_shape
from pagemesh.cli.planning.weights import weights_of


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_the_type_is_that_of_the_files_where_the_configuration_has_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, stored: torch.dtype
) -> None:
    silent = {name: value for name, value in LLAMA_70B.items() if "dtype" not in name}
    (tmp_path / "config.json").write_text(json.dumps(silent))
    save_file({"a": torch.zeros(3, 5, dtype=stored)}, tmp_path / "model.safetensors")
    found = as_json(capsys, tmp_path, "--tensor-parallel", 2)
    assert found["weights_bytes"] == 15 * stored.itemsize
    assert found["kv"]["dtype"] == str(stored).removeprefix("torch.")


@pytest.mark.parametrize(
    "family",
    [
        "biogpt", "bloom", "cohere", "cohere2", "ctrl", "ernie4_5", "exaone4", "falcon", "gemma",
        "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj",
        "granite", "jetmoe", "llama", "mistral", "mpt", "olmo2", "openai-gpt", "opt", "phi",
        "qwen2", "qwen3", "smollm3", "stablelm", "starcoder2", "xglm",
    ],
)  # fmt: skip
def test_a_head_is_tied_where_the_familys_own_code_ties_it(tmp_path: Path, family: str) -> None:
    from transformers import CONFIG_MAPPING

    file = CONFIG_MAPPING[family]().to_dict() | {"model_type": family, "dtype": "float16"}
    copies = 2 if file.pop("tie_word_embeddings") else 1
    save_file({"table": torch.zeros(5, dtype=torch.float16)}, tmp_path / "model.safetensors")
    planned = weights_of(tmp_path, file, read_shape(file, family), "float16", on_cpu=True)
    assert planned is not None and planned.count_bytes == copies * 10


@pytest.mark.parametrize("said", [{}, {"tie_word_embeddings": False}])
def test_a_head_is_its_own_matrix_on_a_cpu_where_a_family_ties_it_without_a_word(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, said: dict[str, bool]
) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    other = {"hidden_size": 64, "head_dim": 16, "vocab_size": 1_000, "sliding_window": 64}
    most = {"model_type": "gemma2", "max_position_embeddings": 128, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(sizes | other | most | said))
    table = torch.zeros(1_000, 64, dtype=torch.bfloat16)
    save_file({"model.embed_tokens.weight": table}, tmp_path / "model.safetensors")
    copies = 1 if said else 2
    assert as_json(capsys, tmp_path)["weights_bytes"] == copies * table.nbytes
