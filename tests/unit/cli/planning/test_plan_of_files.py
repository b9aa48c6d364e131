"""What ``pagemesh plan`` makes of files that say less than it needs, or what they should not."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.unit.cli.planning.test_memory import LLAMA_70B
from tests.unit.cli.planning.test_plan_command import as_json, shown

from pagemesh.runtime.model_folder import INDEX_NAME

NO_TYPE = {name: value for name, value in LLAMA_70B.items() if "dtype" not in name}
ASSUMED = "neither config.json nor weights say the type: counted as bfloat16"


def write(folder: Path, **fields: object) -> Path:
    (folder / "config.json").write_text(json.dumps({**NO_TYPE, **fields}))
    return folder


def test_a_type_that_nothing_says_is_assumed_and_the_assumption_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = as_json(capsys, write(tmp_path))
    assert found["kv"]["dtype"] == "bfloat16" and ASSUMED in " ".join(found["notes"])
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "not-here.safetensors"}}))
    assert as_json(capsys, tmp_path) == found
    assert ASSUMED not in shown(capsys, write(tmp_path, torch_dtype="float32"))


def test_blocks_of_a_quantised_checkpoint_are_not_the_type_of_its_keys_and_values(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    blocks = {"blocks": torch.zeros(64, dtype=torch.uint8), "scales": torch.zeros(2).half()}
    save_file(blocks, tmp_path / "model.safetensors")
    found = as_json(capsys, write(tmp_path, quantization_config={"quant_method": "mxfp4"}))
    assert found["kv"]["dtype"] == "float16" and ASSUMED not in " ".join(found["notes"])


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [({"model_type": "glm4_moe"}, 500), ({"quantization_config": {"bits": 4}}, None)],
)
def test_an_index_says_how_large_weights_are_that_are_not_here(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    fields: dict[str, object],
    parameters: int | None,
) -> None:
    for size, said in ((1_000, 1_000), (1e3, 1_000), ("1000", None), (-1, None)):
        index = {"metadata": {"total_size": size}, "weight_map": {"a": "1.safetensors"}}
        (tmp_path / INDEX_NAME).write_text(json.dumps(index))
        found = as_json(capsys, write(tmp_path, torch_dtype="bfloat16", **fields))
        assert found["weights_bytes"] == said
        assert found["weights_parameters"] == (parameters if said else None)


def test_the_parameters_that_the_text_tells_are_in_the_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "70.6 billion parameters" in shown(capsys, write(tmp_path))
    assert as_json(capsys, tmp_path)["weights_parameters"] == 70_553_706_496
    assert as_json(capsys, tmp_path, "--weights", "1GB")["weights_parameters"] is None


def test_a_configuration_comes_through_a_pipe(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pipe = tmp_path / "config"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(json.dumps(LLAMA_70B),))
    writer.start()
    assert as_json(capsys, pipe)["model"]["layers"] == 80
    writer.join()


def test_a_longer_context_than_up_serves_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = shown(capsys, write(tmp_path, model_max_length=1 << 20))
    assert "context 131,072" in text
    assert "says model_max_length 1,048,576; what counts here, and for `pagemesh up`" in text


def test_sessions_that_are_shorter_than_the_shared_tokens_are_told_apart(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = "sessions no longer than that share all but one"
    assert told in shown(capsys, write(tmp_path), "--shared-tokens", 5_000)
    assert told not in shown(capsys, tmp_path, "--shared-tokens", 2_000)


@pytest.mark.parametrize(
    "name", ["Evil\x1b[31m\nnote  fakeForCausalLM", "E\x07", "x" * 5_000 + "ForCausalLM", "\u202e"]
)
def test_a_name_out_of_a_file_is_harmless_to_a_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    text = shown(capsys, write(tmp_path, architectures=[name]))
    [line] = [one for one in text.splitlines() if "pagemesh up` " in one and "keeps" not in one]
    assert len(line) < 300 and not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "\nnote  fake" not in text
