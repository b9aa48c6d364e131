"""``pagemesh plan`` as a user runs it: one screen, one JSON, or one line that says why not."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file
from tests.unit.cli.planning.test_memory import LLAMA_70B
from tests.unit.cli.test_command_line import error_of
from tests.unit.engine.models import SHAPE, save_twin
from transformers import LlamaConfig

from pagemesh.cli.main import run
from pagemesh.cli.planning.lifetime import Pace, waste_over_time
from pagemesh.cli.planning.memory import PAGE_SIZES
from pagemesh.engine.loading import load_model
from pagemesh.engine.worker.settings import WorkerLimits
from pagemesh.kernels.layout import PageLayout
from pagemesh.kernels.ops import PackedLinear, packed_shape
from pagemesh.kernels.weight_types import ASKED_TYPES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "llama-70b"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(LLAMA_70B))
    return made


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert run(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shown(capsys, *arguments, "--json"))
    return found


def test_a_plan_says_sizes_in_decimal_and_binary_units(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    text = shown(capsys, folder, "--memory", "80GB", "--tensor-parallel", 4)
    assert "bfloat16: 320 KiB a token, 5 MiB a page of 16 tokens" in text
    assert "141.1 GB (131.4 GiB): bfloat16, 70.6 billion parameters" in text
    assert "4 x 80 GB (74.51 GiB), 90% usable: 49% weights, 51% KV" in text
    assert "13 of 32,768 tokens (10.74 GB (10 GiB) each" in text
    assert "as multi-head it would be 2.5 MiB a token" in text


def test_the_waste_of_given_lengths_is_told_page_size_by_page_size(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    text = shown(capsys, folder, "--pool-bytes", "10GB", "--lengths", "800,2300,3900",
                 "--reserve-tokens", 4096)  # fmt: skip
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "contiguous, 4,096 reserved 5,288 of 12,288 slots wasted (43.0%)" in lines
    assert "pages of 256 424 of 7,424 slots wasted (5.7%)" in lines
    assert "pages of 16 8 of 7,008 slots wasted (0.11%)" in lines


def test_waste_over_time_is_told_with_the_speeds_that_it_is_told_for(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(capsys, folder, "--pool-bytes", "10GB", "--page-size", 8)
    assert "computed at 5,000 tokens/s and the last 256 tokens drawn at 33/s" in text
    given = ["--answer-tokens", 100, "--prompt-speed", 900, "--answer-speed", 7]
    monkeypatch.setenv("PAGEMESH_STEP_TOKENS_MAX", "128")
    found = as_json(capsys, folder, "--lengths", "800,2300", "--page-size", 8,
                    "--shared-tokens", 64, *given)["waste_over_time"]  # fmt: skip
    pace = Pace(100, 900, 7, 128, WorkerLimits().prompt_chunks, WorkerLimits().growth_pages)
    assert [one["page_size"] for one in found["page_sizes"]] == [8, *PAGE_SIZES]
    for one in found["page_sizes"]:
        waste = waste_over_time([800, 2_300], one["page_size"], pace, 64)
        told = (one["tail"], one["growth"], one["prompt"], one["total"])
        assert told == (waste.tail, waste.growth, waste.prompt, waste.total)
    assert (found["answer_tokens"], found["chunk_tokens"]) == (100, 128)


def test_the_documentation_shows_what_is_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[4]
    page = (root / "ops" / "docs" / "planning.md").read_text()
    example = [line[4:] for line in page.splitlines() if line.startswith("    ")]
    typed = " ".join(example[:2]).replace("\\", "").split()
    assert typed[:3] == ["$", "pagemesh", "plan"]
    (tmp_path / typed[3]).mkdir()
    (tmp_path / typed[3] / "config.json").write_text(json.dumps(LLAMA_70B))
    monkeypatch.chdir(tmp_path)
    printed = shown(capsys, *typed[3:]).splitlines()
    assert [line for line in printed if line] == example[2:]
    readme = (root / "README.md").read_text().partition("## Planning memory")[2]
    excerpt = [line[4:] for line in readme.partition("\n## ")[0].splitlines() if line[:4] == "    "]
    assert excerpt[0].startswith("$ pagemesh plan llama-3.1-70b --memory 80GB --tensor-parallel 4")
    assert set(excerpt[1:]) - {"..."} < set(printed)


def test_json_holds_the_numbers_in_bytes(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    found = as_json(capsys, folder / "config.json", "--memory", "24GB", "--weights", "13.48GB",
                    "--share", "1", "--kv-dtype", "fp8", "--host-memory", "1GiB")  # fmt: skip
    assert found["memory"]["kv_bytes"] == 24_000_000_000 - 13_480_000_000
    assert found["kv"]["dtype"] == "e4m3" and found["kv"]["finite_max"] == 448
    assert found["pool"]["pages"] == found["memory"]["kv_bytes"] // found["kv"]["page_bytes"]
    assert [tier["name"] for tier in found["tiers"]] == ["device", "host"]
    assert [one["tokens"] for one in found["sessions"]] == [2048, 8192, 32768, 131072]


def test_without_a_model_the_demo_model_is_planned_as_up_would_run_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = as_json(capsys)
    assert found["model"]["name"] == "pagemesh-demo"
    page = PageLayout(layers=4, kv_heads=2, head_dim=64, page_size=16).page_bytes
    assert found["kv"]["page_bytes"] == page
    assert found["pool"]["pages"] == (512 << 20) // page
    monkeypatch.setenv("PAGEMESH_POOL_BYTES", "1MiB")
    assert as_json(capsys)["pool"]["pages"] == (1 << 20) // page
    monkeypatch.setenv("PAGEMESH_PAGE_SIZE", "32")
    assert as_json(capsys)["kv"]["page_size"] == 32
    assert as_json(capsys, "--page-size", "16")["kv"]["page_size"] == 16


def test_a_plan_of_other_pages_than_up_would_make_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    assert "to plan that: --kv-dtype float32" in shown(capsys, folder)
    assert "to plan that" not in shown(capsys, folder, "--kv-dtype", "float32")
    assert "to plan that" not in shown(capsys), "without a model it is as up would"
    monkeypatch.setenv("PAGEMESH_KV_DTYPE", "bfloat16")
    assert "to plan that" not in shown(capsys)
    assert "to plan that" not in shown(capsys, folder)


def test_weights_are_counted_in_their_files(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    save_file({"a": np.zeros((3, 5), np.float16)}, folder / "one.safetensors")
    save_file({"b": np.zeros(7, np.float32)}, folder / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    devices = ("--tensor-parallel", 2)
    assert as_json(capsys, folder, *devices)["weights_bytes"] == 22 * 2
    assert as_json(capsys, folder, *devices, "--dtype", "float32")["weights_bytes"] == 22 * 4


def planned_bytes(packed: PackedLinear) -> int:
    """Of a matrix as it is kept, or in sixteen bits where it takes twelve: the plan does not count
    on these."""
    if packed.weight_type != "slim_bfloat16":
        return packed.panels.nbytes
    sixteen_bits = 2 * math.prod(packed_shape(packed.n, packed.k, "bfloat16"))
    assert packed.panels.nbytes < 0.8 * sixteen_bits
    return sixteen_bits


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_are_planned_as_a_cpu_keeps_them(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    stored: torch.dtype,
    is_tied: bool,
) -> None:
    shape = SHAPE | {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 2_048}
    model = tmp_path / "model"
    save_twin(model, LlamaConfig(**shape, tie_word_embeddings=is_tied), dtype=stored)
    for asked in ASKED_TYPES:
        own = load_model(
            model, name="m", page_size=16, cache=tmp_path / "cache", weight_type=asked
        ).weights
        matrices = [m for at in own.layers for m in (at.qkv, at.output, at.gate_up, at.down)]
        loaded = own.embedding.nbytes + sum(map(planned_bytes, (*matrices, own.head)))
        planned = as_json(capsys, model, "--dtype", asked)["weights_bytes"]
        assert planned == pytest.approx(loaded, rel=0.02), asked
    monkeypatch.setenv("PAGEMESH_DEVICE", "cuda")
    count = own.embedding.numel() * (1 if is_tied else 2) + sum(m.n * m.k for m in matrices)
    planned = as_json(capsys, model, "--dtype", "bfloat16")["weights_bytes"]
    assert planned == pytest.approx(2 * count, rel=0.002), "a tied head is the same memory there"


def test_a_head_in_the_files_is_not_the_embeddings_whatever_the_configuration_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_twin(tmp_path, LlamaConfig(**SHAPE))
    before = as_json(capsys, tmp_path)["weights_bytes"]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert as_json(capsys, tmp_path)["weights_bytes"] == before


def test_weights_of_a_quantised_checkpoint_are_not_guessed(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    config = LLAMA_70B | {"quantization_config": {"bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    assert as_json(capsys, folder)["weights_bytes"] is None
    assert "--weights" in error_of(capsys, "plan", folder, "--memory", "80GB")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("part", ["", "text_config"])
@pytest.mark.parametrize("asked", [(), ("--dtype", "float32"), ("--dtype", "int8")])
def test_a_quantised_checkpoint_is_planned_as_its_files_store_it(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    device: str,
    part: str,
    asked: tuple[str, ...],
) -> None:
    said = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    config = {**LLAMA_70B, part: LLAMA_70B | said} if part else LLAMA_70B | said
    (folder / "config.json").write_text(json.dumps(config))
    packed = {
        "qweight": torch.zeros(256, 256, dtype=torch.int32),
        "scales": torch.zeros(16, 3, dtype=torch.bfloat16),
    }
    rest = {
        "fp8": torch.zeros(3, 5).to(torch.float8_e4m3fn),
        "fp4": torch.zeros(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }
    save_torch_file(packed, folder / "one.safetensors", metadata={"format": "pt"})
    save_torch_file(rest, folder / "two.safetensors")
    names = dict.fromkeys(packed, "one.safetensors") | dict.fromkeys(rest, "two.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    monkeypatch.setenv("PAGEMESH_DEVICE", device)
    stored = 262_144 + 16 * 3 * 2 + 3 * 5 + 16
    assert as_json(capsys, folder, *asked)["weights_bytes"] == stored
    [line] = [one for one in shown(capsys, folder, *asked).splitlines() if one[:7] == "weights"]
    assert line.endswith(": quantised, as its files store it")
    (folder / "two.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0nonsense nonsense")
    assert "two.safetensors: broken" in error_of(capsys, "plan", folder)
    (folder / "two.safetensors").unlink()
    assert as_json(capsys, folder)["weights_bytes"] is None


def test_the_weights_of_a_model_that_also_sees_are_not_those_of_its_decoder(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    config = {"model_type": "internvl_chat", "vision_config": {}, "llm_config": LLAMA_70B}
    (folder / "config.json").write_text(json.dumps(config))
    assert as_json(capsys, folder)["weights_bytes"] is None
    assert "--weights" in error_of(capsys, "plan", folder, "--memory", "1TB")
    save_file({"a": np.zeros((3, 5), np.float16)}, folder / "model.safetensors")
    assert as_json(capsys, folder, "--tensor-parallel", 2)["weights_bytes"] == 15 * 2


def test_a_model_with_windows_is_told_what_is_allocated_and_what_could_be_saved(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    config = LLAMA_70B | {"model_type": "mistral", "sliding_window": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    text = shown(capsys, folder, "--pool-bytes", "100GB")
    assert "80 of 80 layers look back 4,096 tokens" in text
    assert "pages of windowed layers do not go early yet" in text


def test_a_shared_prefix_counts_for_windows_as_for_the_sessions_above_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gemma = {
        "model_type": "gemma3_text", "hidden_size": 1_152, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "max_position_embeddings": 32_768, "sliding_window": 512, "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    sizes = ("--pool-bytes", "4GiB", "--session-tokens", 32_768)
    given = (tmp_path, *sizes, "--shared-tokens", 32_000)
    text = shown(capsys, *given)
    assert " 168 of 32,768 tokens (" in text
    assert "if their pages went early, 276 of 32,768 tokens would fit" in text
    assert int(as_json(capsys, *given)["windowed_session"]["fit"]) == 276


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["/does/not/exist"], "/does/not/exist"),
        (["owner/name"], "download its config.json first"),
        (["~nobody-here/x"], "no home folder is known for its ~"),
        (["n" * 300], "file name too long"),
        (["{folder}", "--memory", "8G"], "--memory"),
        (["{folder}", "--memory", "24"], "'24' would be bytes; give it a unit, as in 24GB"),
        (["{folder}", "--memory", "80GB", "--pool-bytes", "1GB"], "exclude each other"),
        (["{folder}", "--kv-dtype", "int3"], "--kv-dtype"),
        (["{folder}", "--tensor-parallel", "3"], "--tensor-parallel 3"),
        (["{folder}/heads.json", "--tensor-parallel", "2"], "; 1, 3, 5, 15, 17, 51, 85, 255, 257"),
        (["{folder}", "--lengths", "1,-2"], "--lengths"),
        (["{folder}", "--lengths", ""], "--lengths"),
        (["{folder}", "--lengths", "9" * 5_000], "token counts such as 800,2300,3900 (1 to"),
        (["{folder}", "--lengths", "5,131073"], "--lengths 131073 exceeds the model's context of"),
        (["{folder}", "--shared-tokens", "131073"], "--shared-tokens 131073 exceeds the model's"),
        (
            ["{folder}", "--session-tokens", "2048", "--shared-tokens", "5000"],
            "--shared-tokens 5000 exceeds --session-tokens 2048",
        ),
        (["/dev/zero"], "far too large"),
        (["{folder}", "--share", "0"], "--share"),
        (["{folder}", "--share", "90%"], "'90%' is not a valid number"),
        (["{folder}", "--share", "nan"], "'nan' is no number 0.0<x<=1.0"),
        (["{folder}", "--prompt-speed", "0"], "--prompt-speed"),
        (["{folder}/broken.json"], "cannot be read as JSON"),
        (["{folder}/list.json"], "holds no JSON object"),
        (["{folder}/mla.json"], "kv_lora_rank"),
        (["{folder}/wide.json"], "head_dim is 1024"),
    ],
)
def test_what_cannot_be_planned_is_one_line_that_says_why(
    capsys: pytest.CaptureFixture[str], folder: Path, arguments: list[str], named: str
) -> None:
    (folder / "broken.json").write_text("{not json")
    (folder / "list.json").write_text("[]")
    (folder / "mla.json").write_text(json.dumps(LLAMA_70B | {"kv_lora_rank": 512}))
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), (1 << 32) - 1)
    (folder / "heads.json").write_text(json.dumps(LLAMA_70B | heads | {"head_dim": 64}))
    (folder / "wide.json").write_text(json.dumps(LLAMA_70B | {"head_dim": 1024}))
    filled = [part.replace("{folder}", str(folder)) for part in arguments]
    assert named in error_of(capsys, "plan", *filled)


def test_a_broken_weights_file_is_named(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0nonsense nonsense")
    assert "model.safetensors" in error_of(capsys, "plan", folder)


def test_planning_loads_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pagemesh.cli.main import run; assert run(['plan']) == 0;"
        "assert not {'torch', 'transformers', 'nats'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_type_that_is_not_known_is_told_where_it_is_counted_as_another(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA_70B | {"torch_dtype": "float7"}))
    text = " ".join(shown(capsys, folder, "--memory", "1TB").split())
    assert "the config's type 'float7' is none that pagemesh knows: counted as bfloat16" in text
    (folder / "config.json").write_text(json.dumps(LLAMA_70B | {"torch_dtype": "bfloat16"}))
    known = " ".join(shown(capsys, folder, "--memory", "1TB").split())
    sizes = [re.search(r"weights [\d.]+ GB", one) for one in (text, known)]
    assert sizes[0] and sizes[1] and sizes[0][0] == sizes[1][0]


def test_a_type_that_up_keeps_no_weights_as_is_told(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    told = "`pagemesh up` keeps no weights as float16 on a CPU, but as"
    for dtype in ("float16", "bfloat16"):
        text = " ".join(shown(capsys, folder, "--memory", "1TB", "--dtype", dtype).split())
        assert (told in text) == (dtype == "float16")


def test_a_plan_tells_what_up_would_say_of_the_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def notes(**fields: object) -> list[str]:
        file = tmp_path / "model.json"
        file.write_text(json.dumps({**LLAMA_70B, "dtype": "float32", **fields}))
        found: list[str] = as_json(capsys, file, "--kv-dtype", "float32")["notes"]
        return found

    assert notes(architectures=["LlamaForCausalLM"]) == []
    [note] = notes(architectures=["LlamaForCausalLM"], quantization_config={"bits": 4})
    assert note.startswith("`pagemesh up` does not run it: quantised checkpoints")
    [note] = notes(architectures=["FalconForCausalLM"])
    assert "FalconForCausalLM is none that pagemesh is tested with" in note
    [note] = notes(architectures=5)
    assert "values of the wrong kind" in note


def test_an_encoder_has_no_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bert.json").write_text(
        json.dumps({**LLAMA_70B, "architectures": ["BForMaskedLM"]})
    )
    assert "BForMaskedLM is an encoder" in error_of(capsys, "plan", tmp_path / "bert.json")


def test_one_head_is_one_head(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mqa.json").write_text(json.dumps({**LLAMA_70B, "num_key_value_heads": 1}))
    assert "80 layers, 1 KV head x 128 (multi-query, 64 query" in shown(
        capsys, tmp_path / "mqa.json"
    )
