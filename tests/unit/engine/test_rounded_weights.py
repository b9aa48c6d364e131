"""Models whose weights are rounded: their bits, their files, their name, what they lose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ops.demo_model.kv_quality import documents, probes
from ops.demo_model.weight_quality import measure
from tests.unit.engine.fallback_twins import save_fallback_twin
from tests.unit.engine.harness import Pages, load_decoder, logits_in_chunks, logits_of, some_tokens
from tests.unit.engine.models import SHAPE, VOCAB, save_twin, twins
from transformers import LlamaConfig

from pagemesh.engine import fallback_loading, prepared
from pagemesh.engine.fallback import PackedModule, linears
from pagemesh.engine.fallback_loading import load_fallback
from pagemesh.engine.loading import LoadedModel, load_model
from pagemesh.kernels import decoder_step
from pagemesh.kernels.linear.packed import unpack_linear
from pagemesh.kernels.native.library import CpuLevel
from pagemesh.kernels.ops import KvPool, pack_linear, ragged_batch
from pagemesh.kernels.weight_types import ASKED_TYPES, AskedType

PROBES = 9
TOKENS = 60
LOGIT_ERROR_MAX: dict[AskedType, float] = {"bfloat16": 0.03, "int8": 0.08}
PERPLEXITY_RATIO_MAX = 1.003


def load(folder: Path, weight_type: AskedType) -> LoadedModel:
    cache = folder.parent / "cache"
    return load_model(folder, name="tiny", page_size=16, cache=cache, weight_type=weight_type)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all models, so that each is made once."""
    return tmp_path_factory.mktemp("int8")


@pytest.mark.parametrize("weight_type", ["int8", "bfloat16"])
@pytest.mark.parametrize("name", ["llama-tied-biased", "qwen3-head-norm", "phi3-fused"])
def test_a_whole_step_has_the_bits_of_its_operations_and_of_each_row_alone(
    name: str, weight_type: AskedType, level: CpuLevel, folders: Path
) -> None:
    if not (folders / name).exists():
        save_twin(folders / name, twins()[name])
    check_step(folders / name, weight_type, (150, 3, 1))  # enough for more than one thread


def check_step(folder: Path, weight_type: AskedType, counts: Sequence[int]) -> None:
    """A step over prompts of ``counts`` tokens, of its operations, and of chunks of the first."""
    decoder, pool = load_decoder(folder, weight_type=weight_type)
    pages = Pages(pool)
    tokens = [some_tokens(count, vocab=VOCAB, seed=count) for count in counts]
    tables = [pages.table(len(own)) for own in tokens]
    together = logits_of(
        decoder, pool, [(t, own, 0) for t, own in zip(tables, tokens, strict=True)]
    )
    batch = ragged_batch(tables, [0] * len(counts), list(counts), 16)
    joined = torch.from_numpy(np.concatenate(tokens).astype(np.int64))
    _, whole = decoder.step(joined, batch, torch.arange(batch.rows), pool, logits=True)
    assert whole is not None
    assert torch.equal(whole, torch.cat(together))
    apart = logits_in_chunks(decoder, pool, pages.table(counts[0]), tokens[0], (33, 17))
    assert torch.equal(apart, together[0])


@pytest.mark.parametrize("weight_type", ["int8", "bfloat16"])
def test_a_step_of_odd_widths_has_the_bits_of_its_operations(
    weight_type: AskedType, level: CpuLevel, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (folders / "odd").exists():
        save_twin(folders / "odd", LlamaConfig(**SHAPE | {"intermediate_size": 93}))
    check_step(folders / "odd", weight_type, (150, 3, 1))
    monkeypatch.setattr(decoder_step, "threads", lambda: 1)
    check_step(folders / "odd", weight_type, (41, 2, 1))  # nearly what one thread has room for


def test_matrices_are_codes_of_a_float32_checkpoint_and_all_else_stays_float32(
    tmp_path: Path,
) -> None:
    twin = save_twin(tmp_path / "model", LlamaConfig(**SHAPE, attention_bias=True))
    own, layer = load(tmp_path / "model", "int8").weights, twin.model.layers[1]
    assert torch.equal(own.embedding, twin.model.embed_tokens.weight)
    assert torch.equal(own.layers[1].mlp_norm, layer.post_attention_layernorm.weight)
    assert torch.equal(own.layers[1].output.bias, layer.self_attn.o_proj.bias)
    for packed, weight in (
        (own.head, twin.lm_head.weight),
        (own.layers[1].down, layer.mlp.down_proj.weight),
    ):
        assert packed.weight_type == "int8"
        half_code = weight.abs().amax(1, keepdim=True) / 254
        assert ((unpack_linear(packed) - weight).abs() <= half_code * 1.00001).all()


def test_beside_codes_the_embeddings_of_a_checkpoint_in_half_precision_stay_as_they_are(
    tmp_path: Path,
) -> None:
    twin = save_twin(tmp_path / "model", LlamaConfig(**SHAPE), dtype=torch.bfloat16)
    own = load(tmp_path / "model", "int8").weights
    assert own.embedding.dtype is torch.bfloat16
    assert own.head.weight_type == "int8"
    assert torch.equal(own.embedding.float(), twin.model.embed_tokens.weight)


def test_each_type_is_a_file_of_its_own_that_every_load_maps(tmp_path: Path) -> None:
    save_twin(tmp_path / "model", LlamaConfig(**SHAPE))
    sizes = {}
    for weight_type in ASKED_TYPES:
        before = set((tmp_path / "cache").glob("*.safetensors"))
        first = load(tmp_path / "model", weight_type)
        [made] = set((tmp_path / "cache").glob("*.safetensors")) - before
        sizes[weight_type] = made.stat().st_size
        again = load(tmp_path / "model", weight_type)
        for model in (first, again):
            assert str(made) in mapped_file(model.weights.head.panels)
    assert sizes["int8"] < 0.3 * sizes["float32"]


def mapped_file(tensor: torch.Tensor) -> str:
    """The line of this process's memory map that holds ``tensor``."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(word, 16) for word in line.split()[0].split("-"))
        if low <= tensor.data_ptr() < high:
            return line
    return "private memory"


def test_rounded_weights_are_another_root_and_the_same_one_every_time(tmp_path: Path) -> None:
    save_twin(tmp_path / "model", LlamaConfig(**SHAPE))
    roots = [load(tmp_path / "model", kind).root for kind in ("float32", "int8", "int8")]
    assert roots[0] != roots[1] == roots[2]


def test_pages_of_rows_that_were_not_rounded_are_another_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_twin(tmp_path / "model", LlamaConfig(**SHAPE))
    roots = [load(tmp_path / "model", kind).root for kind in ("int8", "bfloat16")]
    monkeypatch.setattr(prepared, "rounds_rows", lambda weight_type: False)
    before = [load(tmp_path / "model", kind).root for kind in ("int8", "bfloat16")]
    assert len({*roots, *before}) == 4


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "GPTNeoXForCausalLM"])
def test_the_fallback_gives_what_its_modules_give_over_what_the_codes_mean(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = save_fallback_twin(tmp_path / "model", architecture)
    for _, module in linears(twin):
        meant = unpack_linear(pack_linear(module.weight, weight_type="int8"))
        module.weight = torch.nn.Parameter(meant)  # its own, also where it was tied
    # Rounded rows would make a difference of a last bit one of a thousandth.
    monkeypatch.setattr(fallback_loading, "_round_rows", lambda model: None)
    found = fallback_logits(tmp_path)
    tokens = torch.from_numpy(some_tokens(TOKENS, vocab=VOCAB).astype(np.int64))
    with torch.inference_mode():
        expected = twin(input_ids=tokens[None], use_cache=False).logits[0]
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_the_fallback_rounds_the_rows_of_its_products_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_fallback_twin(tmp_path / "model", "GPTNeoXForCausalLM")
    prove, proven = fallback_loading._prove, []

    def noted(model: torch.nn.Module, *others: Any) -> None:
        modules = [own for own in model.modules() if isinstance(own, PackedModule)]
        proven.append([own.packed.rounds_rows for own in modules])
        prove(model, *others)

    monkeypatch.setattr(fallback_loading, "_prove", noted)
    found = fallback_logits(tmp_path)
    assert proven[0] and not any(proven[0]), "the proof is about pages"
    monkeypatch.setattr(fallback_loading, "_round_rows", lambda model: None)
    assert not torch.equal(fallback_logits(tmp_path), found)
    product = PackedModule.forward
    monkeypatch.setattr(
        PackedModule, "forward", lambda module, x: product(module, x.bfloat16().float())
    )
    assert torch.equal(fallback_logits(tmp_path), found)


def fallback_logits(folder: Path) -> torch.Tensor:
    """Of the model in ``folder`` with int8 weights."""
    model, decoder = load_fallback(
        folder / "model", name="m", page_size=16, cache=folder / "cache", weight_type="int8"
    )
    pool = KvPool.allocate(model.layout, 4)
    batch = ragged_batch([np.arange(4, dtype=np.uint32)], [0], [TOKENS], 16)
    tokens = torch.from_numpy(some_tokens(TOKENS, vocab=VOCAB).astype(np.int64))
    with torch.inference_mode():
        _, found = decoder.step(tokens, batch, torch.arange(TOKENS), pool, logits=True)
    assert found is not None
    return found.clone()


def test_the_fallback_has_a_root_for_each_type_of_weights(tmp_path: Path) -> None:
    save_fallback_twin(tmp_path / "model", "GPTNeoXForCausalLM")
    roots = set()
    for weight_type in ASKED_TYPES:
        model, _ = load_fallback(
            tmp_path / "model", name="m", page_size=16, cache=tmp_path / "cache",
            weight_type=weight_type,
        )  # fmt: skip
        roots.add(model.root)
    assert len(roots) == len(ASKED_TYPES)


@pytest.mark.timeout(240)
def test_the_demo_model_keeps_its_perplexity_and_recall_with_rounded_weights() -> None:
    found = measure(documents(10), probes(PROBES))
    exact = found["float32"]
    assert exact.recall > 0.5, "there is something to lose"
    for weight_type, error_max in LOGIT_ERROR_MAX.items():
        rounded = found[weight_type]
        assert 0 < rounded.logit_error <= error_max, weight_type
        assert rounded.perplexity <= exact.perplexity * PERPLEXITY_RATIO_MAX, weight_type
        assert rounded.recall >= exact.recall - 1 / PROBES - 1e-9, weight_type
