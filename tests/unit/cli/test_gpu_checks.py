"""A mesh on a GPU is refused in one line where there is none, or too little of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support.model_files import write_model_files

from pagemesh.cli.mesh import gpu_check
from pagemesh.cli.mesh.run_folder import run_folder
from pagemesh.cli.mesh.screen import Screen
from pagemesh.cli.up import MeshPlan, _ready, plan
from pagemesh.engine.cuda.graph_bytes import (
    CONTEXT_BYTES,
    context_bytes_max,
    draw_bytes_max,
    graph_bytes_max,
)
from pagemesh.runtime.service_config import ServiceConfig, load_service_config
from pagemesh.wire.errors import ConfigError


@pytest.fixture(autouse=True)
def pool_folder(clean_environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGEMESH_POOL_DIR", str(tmp_path / "pools"))


def gpu_config(pool_bytes: int) -> ServiceConfig:
    given = {"PAGEMESH_DEVICE": "cuda", "PAGEMESH_POOL_BYTES": str(pool_bytes)}
    return load_service_config(given)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ('{"name": "A GPU", "torch": "2", "free_bytes": 1048575, "total_bytes": 9}', "A GPU has"),
        ('{"error": "PAGEMESH_DEVICE=cuda (--device): torch finds no GPU"}', "torch finds no GPU"),
        ("", "asking for the GPU failed"),
        ("warning: something", "asking for the GPU failed"),
    ],
)
def test_a_gpu_that_is_not_there_or_too_small_is_one_line(
    monkeypatch: pytest.MonkeyPatch, said: str, named: str
) -> None:
    answers_the_probe(monkeypatch, said)
    with pytest.raises(ConfigError, match=named) as caught:
        gpu_check.check_gpu(gpu_config(1 << 20))
    assert "\n" not in str(caught.value)


def test_a_driver_that_never_answers_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 120.0)

    answers_the_probe(monkeypatch, "")
    monkeypatch.setattr(subprocess, "run", hangs)
    with pytest.raises(ConfigError, match="does not answer within 120 seconds"):
        gpu_check.check_gpu(gpu_config(1 << 20))


def test_a_gpu_that_will_do_is_named_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = '{"name": "A GPU", "torch": "2.13", "free_bytes": 2097152, "total_bytes": 4194304}'
    answers_the_probe(monkeypatch, found)
    told = gpu_check.check_gpu(gpu_config(1 << 20))
    assert str(told) == "A GPU, 2 MiB of 4 MiB free, torch 2.13"


CONTEXT_TOKENS = 131_072


def gpu_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_bytes: int,
             **flags: str) -> MeshPlan:  # fmt: skip
    """Of ``up --device cuda`` where so much of a GPU is free."""
    found = {"name": "A GPU", "torch": "2.13", "free_bytes": free_bytes, "total_bytes": 1 << 40}
    answers_the_probe(monkeypatch, json.dumps(found))
    folder = write_model_files(
        tmp_path / "tiny", vocab_size=128_000, hidden_size=4_096, head_dim=128,
        max_position_embeddings=CONTEXT_TOKENS,
    )  # fmt: skip
    tensors = {"weight": torch.zeros(1 << 20, dtype=torch.bfloat16)}
    save_file(tensors, str(folder / "model.safetensors"))
    given = {"PAGEMESH_MODEL": str(folder), "PAGEMESH_HTTP": ":0", "PAGEMESH_DEVICE": "cuda"}
    return plan(dict(os.environ), given | {"PAGEMESH_POOL_BYTES": "64MiB"} | flags, Screen())


def test_the_pool_has_to_fit_beside_weights_and_decode_steps_of_every_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = (2 << 20) + graph_bytes_max(
        sequence_count_max=256, vocab_tokens=128_000, hidden_size=4_096, item_bytes=2
    )
    own += context_bytes_max(
        sequence_count_max=256, context_tokens_max=CONTEXT_TOKENS, page_size=16, head_dim=128
    )
    own += draw_bytes_max(sequence_count_max=256, vocab_tokens=128_000)
    gpu_plan(monkeypatch, tmp_path, (1 << 26) + own)
    with pytest.raises(ConfigError, match=r"2 MiB of weights and up to .* in its worker; lower it"):
        gpu_plan(monkeypatch, tmp_path, (1 << 26) + own - 1)
    two = {"PAGEMESH_PREFILL": "1"}
    both = 2 * own + CONTEXT_BYTES
    gpu_plan(monkeypatch, tmp_path, (1 << 26) + both, **two)
    with pytest.raises(ConfigError, match="in each of 2 workers"):
        gpu_plan(monkeypatch, tmp_path, (1 << 26) + both - 1, **two)


def test_a_gpu_gets_one_worker_for_both_roles_unless_prefill_workers_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def counts(**flags: str) -> tuple[int, int]:
        up = gpu_plan(monkeypatch, tmp_path, 1 << 39, **flags).up
        return up.prefill_count, up.decode_count

    assert counts() == (0, 1)
    assert counts(PAGEMESH_PREFILL="1") == (1, 1)
    assert counts(PAGEMESH_DECODE="2") == (0, 2)
    assert counts(PAGEMESH_DECODE="0") == (1, 0)
    assert counts(PAGEMESH_DEVICE="interpreter") == (1, 1)


def test_all_workers_of_a_gpu_are_told_the_type_that_the_model_is_stored_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker = gpu_plan(monkeypatch, tmp_path, 1 << 39).config.worker
    assert (worker.dtype, worker.kv_dtype) == ("bfloat16", "bfloat16")
    given = gpu_plan(monkeypatch, tmp_path, 1 << 39, PAGEMESH_KV_DTYPE="int8").config.worker
    assert (given.dtype, given.kv_dtype) == ("bfloat16", "int8")
    on_cpu = gpu_plan(monkeypatch, tmp_path, 1 << 39, PAGEMESH_DEVICE="cpu").config.worker
    assert (on_cpu.dtype, on_cpu.kv_dtype) == ("float32", "float32")


def test_the_ready_line_names_the_types_on_a_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with run_folder(tmp_path, "host") as folder:
        for device, named in (("cuda", "tiny in bfloat16, K and V in bfloat16, on 0 prefill + 1"),
                              ("cpu", "tiny on 1 prefill + 1 decode")):  # fmt: skip
            made = gpu_plan(monkeypatch, tmp_path, 1 << 39, PAGEMESH_DEVICE=device)
            _, (workers, _) = _ready(made, made.config, None, folder, 2.0)
            assert workers.startswith(named)


def answers_the_probe(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """Everything is installed, and the process that asks for the GPU says ``said``."""
    done = subprocess.CompletedProcess([], 0, stdout=said, stderr="it went wrong\n")
    monkeypatch.setattr(gpu_check, "version", lambda _name: "2.13.0")
    monkeypatch.setattr(gpu_check, "LIBRARY", None)  # any library at all
    monkeypatch.setattr(subprocess, "run", lambda *_a, **_k: done)


def test_the_probe_says_in_one_line_why_there_is_no_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pagemesh.engine.cuda.probe"], env=os.environ | {
            "CUDA_VISIBLE_DEVICES": ""
        }, capture_output=True, text=True, check=True,
    )  # fmt: skip
    [line] = done.stdout.splitlines()
    assert "--device" in json.loads(line)["error"]
