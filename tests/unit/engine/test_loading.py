"""Loading maps weights once per host, names them by content, and refuses in one sentence."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.engine.models import SHAPE, save_twin
from transformers import LlamaConfig, LlamaForCausalLM

from pagemesh.engine import checkpoint, files, prepared
from pagemesh.engine.fallback_loading import load_fallback
from pagemesh.engine.files import cache_folder, locked
from pagemesh.engine.loading import LoadedModel, load_model
from pagemesh.kernels.layout import KV_DTYPES, KvDtype
from pagemesh.kernels.linear.packed import unpack_linear
from pagemesh.wire.errors import ConfigError

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_twin(tmp_path / "model", LlamaConfig(**SHAPE, tie_word_embeddings=True))
    return tmp_path / "model"


def load(
    folder: Path, *, page_size: int = 16, cache: Path | None = None, kv_dtype: KvDtype = "float32"
) -> LoadedModel:
    cache = cache or folder.parent / "cache"
    return load_model(folder, name="tiny", page_size=page_size, cache=cache, kv_dtype=kv_dtype)


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder)
    text = str(caught.value)
    assert "\n" not in text
    return text


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def mapped_files(tensor: torch.Tensor) -> str:
    """The line of this process's memory map that holds ``tensor``."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(word, 16) for word in line.split()[0].split("-"))
        if low <= address < high:
            return line
    return "private memory"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_those_of_the_checkpoint_in_float32(tmp_path: Path, dtype: Any) -> None:
    twin = save_twin(tmp_path / "model", LlamaConfig(**SHAPE), dtype=dtype)
    model = load(tmp_path / "model")
    own, layer = model.weights, twin.model.layers[1]
    assert torch.equal(own.embedding, twin.model.embed_tokens.weight)
    assert torch.equal(own.layers[1].mlp_norm, layer.post_attention_layernorm.weight)
    joined = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
    assert torch.equal(unpack_linear(own.layers[1].gate_up), joined)
    assert torch.equal(unpack_linear(own.head), twin.lm_head.weight)


def test_every_weight_is_mapped_from_a_file_and_float32_norms_from_the_checkpoint(
    folder: Path,
) -> None:
    weights = load(folder).weights
    assert str(folder / WEIGHTS) in mapped_files(weights.norm)
    assert str(folder.parent / "cache") in mapped_files(weights.head.panels)
    assert str(folder.parent / "cache") in mapped_files(weights.layers[0].qkv.panels)


def test_a_head_that_is_stored_beside_the_embeddings_it_is_said_to_be_is_its_own(
    folder: Path,
) -> None:
    tensors = load_file(folder / WEIGHTS)
    tied = load(folder)
    own = tensors["model.embed_tokens.weight"].flip(0).clone()
    save_file(tensors | {"lm_head.weight": own}, folder / WEIGHTS, metadata={"format": "pt"})
    model = load(folder)
    twin = LlamaForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    assert torch.equal(twin.lm_head.weight, own), "transformers takes it so"
    assert torch.equal(unpack_linear(model.weights.head), own)
    assert torch.equal(unpack_linear(tied.weights.head), tied.weights.embedding)


def test_a_table_that_both_share_may_be_stored_as_the_head_alone(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    shared = tensors.pop("model.embed_tokens.weight")
    save_file(tensors | {"lm_head.weight": shared}, folder / WEIGHTS, metadata={"format": "pt"})
    twin = LlamaForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    assert torch.equal(twin.model.embed_tokens.weight, shared), "transformers takes it so"
    weights = load(folder).weights
    assert torch.equal(weights.embedding, shared)
    assert torch.equal(unpack_linear(weights.head), shared)


def test_a_single_file_goes_before_the_index_of_an_earlier_version(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    twin = LlamaForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    assert torch.equal(load(folder).weights.norm, twin.model.norm.weight)


def test_half_precision_is_converted_once_and_then_found(tmp_path: Path) -> None:
    save_twin(tmp_path / "model", LlamaConfig(**SHAPE), dtype=torch.bfloat16)
    stages: list[str] = []

    def watch(stage: str, done_bytes: int, total_bytes: int) -> None:
        assert 0 <= done_bytes <= total_bytes
        stages.append(stage)

    for _ in range(2):
        load_model(
            tmp_path / "model", name="m", page_size=16, cache=tmp_path / "cache", progress=watch
        )
        stages.append("|")
    first, second = "-".join(stages).split("|")[:2]
    assert "digest" in first and "prepare" in first
    assert "prepare" not in second


def test_only_the_most_recently_loaded_prepared_files_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "PREPARED_COUNT_MAX", 3)
    cache = folder.parent / "cache"
    first = load(folder)
    (oldest,) = cache.glob("*.safetensors")
    os.utime(oldest, (1_000.0, 1_000.0))
    foreign = [cache / "mine.safetensors", cache / f"{'g' * 32}.f32-panels16-1.safetensors"]
    half = cache / f"{'b' * 32}.f32-panels16-1.partial"
    busy = cache / f"{'c' * 32}.f32-panels16-1.partial"
    for path in (*foreign, half, busy):
        path.write_bytes(b"x")
    with locked(busy.with_suffix(".lock")):
        for epsilon in (1e-3, 1e-4, 1e-5):
            edit_config(folder, rms_norm_eps=epsilon)
            load(folder)
    assert not oldest.exists()
    assert not half.exists()
    assert all(path.exists() for path in (busy, *foreign))
    assert len(list(cache.glob("*.safetensors"))) == 3 + len(foreign)
    assert first.weights.head.panels.any(), "what is mapped stays"


def test_a_prepared_file_that_is_loaded_again_is_kept_before_one_that_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "PREPARED_COUNT_MAX", 2)
    cache = folder.parent / "cache"
    made: list[Path] = []
    for epsilon, age_s in ((1e-3, 1_000.0), (1e-4, 2_000.0)):
        edit_config(folder, rms_norm_eps=epsilon)
        load(folder)
        made += set(cache.glob("*.safetensors")) - set(made)
        os.utime(made[-1], (age_s, age_s))
    for epsilon in (1e-3, 1e-5):
        edit_config(folder, rms_norm_eps=epsilon)
        load(folder)
    assert [path.exists() for path in made] == [True, False]


def _load_and_report(folder: Path, results: Any) -> None:
    results.put(load(folder).root)


def test_processes_that_start_at_once_prepare_one_file(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    children = [context.Process(target=_load_and_report, args=(folder, results)) for _ in range(2)]
    for child in children:
        child.start()
    roots = {results.get(timeout=60) for _ in children}
    for child in children:
        child.join(30)
    assert len(roots) == 1
    cache = folder.parent / "cache"
    assert len(list(cache.glob("*.safetensors"))) == 1
    assert not list(cache.glob("*partial*"))


def test_the_root_changes_with_anything_that_changes_a_page(folder: Path) -> None:
    roots = {load(folder).root, load(folder, page_size=32).root}
    roots |= {load(folder, kv_dtype=dtype).root for dtype in KV_DTYPES[1:]}
    (folder / "tokenizer.json").write_text('{"version": "2.0"}')
    roots.add(load(folder).root)
    edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    roots.add(load(folder).root)
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, folder / WEIGHTS)
    roots.add(load(folder).root)
    assert len(roots) == 9


def test_other_weights_of_the_same_size_and_time_have_another_root(folder: Path) -> None:
    """As after a copy that keeps the time: what is remembered of the file is not of these."""
    path, old_s = folder / WEIGHTS, 1_000_000_000
    cache = folder.parent / "cache"

    def root_with(epsilon: float) -> bytes:
        tensors = load_file(path)
        tensors["model.norm.weight"][0] = epsilon
        other = path.with_suffix(".new")
        save_file(tensors, other, metadata={"format": "pt"})
        path.write_bytes(other.read_bytes())  # the same inode
        os.utime(path, (old_s, old_s))
        return load(folder).root

    roots = [root_with(1.0), root_with(2.0)]
    assert len(set(roots)) == 2
    assert not list(cache.glob("digest-*")), "it was changed a moment ago"
    assert load(folder, cache=folder.parent / "fresh").root == roots[1]


def test_the_digest_of_weights_that_rest_is_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_SETTLED_NS", -1)
    root = load(folder).root
    [known] = (folder.parent / "cache").glob("digest-*")
    monkeypatch.setattr(checkpoint, "_CHUNK_BYTES", 0)  # whoever reads it now reads nothing
    assert load(folder).root == root
    known.unlink()
    assert load(folder).root != root


def test_deterministic_workers_read_no_pages_of_others(folder: Path) -> None:
    """Whose last bits may differ, and pages outlive the workers that wrote them."""
    cache = folder.parent / "cache"
    roots = {
        load_model(folder, name="m", page_size=16, cache=cache, deterministic=exact).root
        for exact in (False, True)
    }
    assert len(roots) == 2


def test_the_root_does_not_depend_on_where_the_model_lies(folder: Path, tmp_path: Path) -> None:
    moved = folder.rename(tmp_path / "elsewhere")
    before = load(moved).root
    moved = moved.rename(tmp_path / "again")
    assert load(moved, cache=tmp_path / "fresh").root == before


def test_a_second_load_does_not_need_transformers(folder: Path) -> None:
    load(folder)
    program = (
        "import sys; from pathlib import Path; from pagemesh.engine.loading import load_model;"
        "load_model(Path(sys.argv[1]), name='m', page_size=16, cache=Path(sys.argv[2]));"
        "assert 'transformers' not in sys.modules"
    )
    command = [sys.executable, "-c", program, str(folder), str(folder.parent / "cache")]
    subprocess.run(command, check=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)})


def test_facts_and_pool_spec_describe_the_model(folder: Path) -> None:
    model = load(folder, page_size=32)
    facts = model.facts(pool_pages=7, deterministic=True)
    assert (facts.model, facts.page_size, facts.pool_pages) == ("tiny", 32, 7)
    assert (facts.context_tokens_max, facts.vocab_tokens) == (512, 199)
    spec = model.pool_spec
    assert spec.page_bytes == 3 * 2 * 2 * 16 * 32 * 4
    assert spec.layout_digest == model.layout.digest


@pytest.mark.parametrize(
    ("kv_dtype", "row_bytes"),
    [("float32", 64), ("float16", 32), ("bfloat16", 32), ("int8", 20), ("e4m3", 20)],
)
def test_pages_are_as_large_as_their_kv_type_makes_them(
    folder: Path, kv_dtype: KvDtype, row_bytes: int
) -> None:
    spec = load(folder, kv_dtype=kv_dtype).pool_spec
    assert spec.page_bytes == 3 * 2 * 2 * 16 * row_bytes, "int8: 16 codes and their scale"


def test_a_folder_without_weights_or_configuration_says_which(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    assert "model.safetensors is missing" in refusal(folder)
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)


def test_broken_files_are_named(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    assert "broken safetensors" in refusal(folder)
    (folder / WEIGHTS).unlink()
    (folder / "model.safetensors.index.json").write_text("{")
    assert "broken index" in refusal(folder)
    (folder / "config.json").write_text("{not json")
    assert "config.json cannot be used" in refusal(folder)


def test_prepared_weights_that_were_cut_short_are_made_anew(folder: Path) -> None:
    """By a loss of power: their name is there before all of them."""
    whole = load(folder).weights
    (path,) = (folder.parent / "cache").glob("*.safetensors")
    start = path.read_bytes()[:100]
    path.unlink()  # what is mapped stays whole
    path.write_bytes(start)
    assert torch.equal(load(folder).weights.head.panels, whole.head.panels)


def test_what_can_be_found_out_again_need_not_be_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk takes nothing from a model whose weights are prepared."""
    root = load(folder).root
    cache = folder.parent / "cache"
    for memo in (*cache.glob("digest-*"), *cache.glob("config-*")):
        memo.unlink()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write_atomically", full)
    monkeypatch.setattr(os, "utime", full)
    assert load(folder).root == root


def test_a_lock_that_cannot_be_opened_is_named(folder: Path) -> None:
    load(folder)
    (path,) = (folder.parent / "cache").glob("*.lock")
    path.unlink()
    path.mkdir()
    assert "PAGEMESH_CACHE_DIR=" in refusal(folder)


def test_missing_misshapen_and_integer_tensors_are_named(folder: Path) -> None:
    good = load_file(folder / WEIGHTS)
    name = "model.layers.2.self_attn.k_proj.weight"
    for bad, reason in [
        ({}, "is missing"),
        ({name: good[name][:-1].clone()}, "has shape [31, 64], config.json wants [32, 64]"),
        ({name: good[name].to(torch.int8)}, "torch.int8"),
    ]:
        rest = {other: tensor for other, tensor in good.items() if other != name}
        save_file(rest | bad, folder / WEIGHTS)
        assert f"{name} " in refusal(folder)
        assert reason in refusal(folder)


def test_the_fallback_names_a_misshapen_tensor_too(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = "model.layers.2.self_attn.k_proj.weight"
    short = {name: tensors[name][:-1].clone()}
    save_file(tensors | short, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        load_fallback(folder, name="tiny", page_size=16, cache=folder.parent / "cache")
    reason = f"tensor {name} has shape [31, 64], config.json wants [32, 64]"
    assert str(caught.value) == f"model {folder}: {reason}"


def test_a_cache_folder_that_cannot_be_made_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"PAGEMESH_CACHE_DIR=.* cannot make this folder"):
        load(folder, cache=tmp_path / "file" / "cache")


def test_a_full_cache_folder_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    text = refusal(folder)
    assert str(folder.parent / "cache") in text and "PAGEMESH_CACHE_DIR" in text


def test_prepared_weights_are_kept_in_the_users_cache_folder_unless_one_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder("") == tmp_path / ".cache" / "pagemesh"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("") == tmp_path / "xdg" / "pagemesh"
    assert cache_folder("~/mine") == tmp_path / "mine"
    with pytest.raises(ConfigError, match=r"^PAGEMESH_CACHE_DIR=~nobody-here/x \(--cache"):
        cache_folder("~nobody-here/x")
