"""``auto`` is float32 on a CPU, and on a GPU what the model is stored in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagemesh.runtime.model_types import page_type, stored_type, told_type, with_types
from pagemesh.runtime.settings import WorkerConfig
from pagemesh.wire.errors import ConfigError

HALF = torch.bfloat16


def save(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


def types(folder: Path, **given: str) -> tuple[str, str]:
    found = with_types(WorkerConfig(model=str(folder), **given))  # type: ignore[arg-type]
    return found.dtype, found.kv_dtype


@pytest.mark.parametrize("device", ["cuda", "interpreter"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("bfloat16", "bfloat16")),
        ({"dtype": "float32"}, ("float32", "float32")),
        ({"dtype": "float16"}, ("float16", "float16")),
        ({"kv_dtype": "int8"}, ("bfloat16", "int8")),
        ({"kv_dtype": "float32"}, ("bfloat16", "float32")),
    ],
)
def test_a_device_computes_and_keeps_pages_in_the_half_precision_of_a_checkpoint(
    tmp_path: Path, device: str, given: dict[str, str], expected: tuple[str, str]
) -> None:
    folder = save(tmp_path / "model", a=torch.zeros(9, dtype=HALF), b=torch.zeros(2))
    assert types(folder, device=device, **given) == expected


def test_a_checkpoint_in_float32_stays_that_on_a_device(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", a=torch.zeros(9), b=torch.zeros(2, dtype=HALF))
    assert types(folder, device="cuda") == ("float32", "float32")


def test_on_a_cpu_nothing_depends_on_how_the_model_is_stored(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", a=torch.zeros(9, dtype=HALF))
    assert types(folder) == ("float32", "float32")
    assert types(folder, dtype="int8") == ("int8", "float32")
    assert types(tmp_path / "none") == ("float32", "float32")


def test_types_that_are_resolved_once_are_what_every_worker_is_told(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", a=torch.zeros(9, dtype=torch.float16))
    once = with_types(WorkerConfig(model=str(folder), device="cuda"))
    (folder / "model.safetensors").unlink()
    assert with_types(once) == once
    assert page_type(once, "float32") == once.kv_dtype == "float16"


def test_files_that_cannot_be_read_are_left_to_whoever_loads_them(tmp_path: Path) -> None:
    assert stored_type(tmp_path) == "float32"
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    assert stored_type(tmp_path) == "float32"
    integers = {"a": torch.zeros(9, dtype=torch.int8), "b": torch.zeros(2, dtype=HALF)}
    assert stored_type(save(tmp_path / "other", **integers)) == "float32"


@pytest.mark.parametrize("packed", [torch.uint8, torch.int32, torch.float8_e4m3fn])
def test_what_quantised_weights_are_packed_in_has_no_vote(
    tmp_path: Path, packed: torch.dtype
) -> None:
    folder = save(tmp_path / "both", a=torch.zeros(9).to(packed), b=torch.zeros(2, dtype=HALF))
    assert stored_type(folder) == told_type(folder) == "bfloat16"
    alone = save(tmp_path / "alone", a=torch.zeros(9).to(packed))
    assert (stored_type(alone), told_type(alone)) == ("float32", None)
    assert told_type(tmp_path / "nowhere") is None


def test_a_broken_index_is_no_matter_here_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert types(tmp_path) == ("float32", "float32")
    with pytest.raises(ConfigError, match="broken index"):
        types(tmp_path, device="cuda")
