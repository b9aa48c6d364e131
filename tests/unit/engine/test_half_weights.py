"""Checkpoints in half precision: kept in as few bytes, with the results of float32, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.engine.fallback_twins import save_fallback_twin
from tests.unit.engine.harness import Pages, load_decoder, logits_of, some_tokens
from tests.unit.engine.models import SHAPE, VOCAB, save_twin, twins
from transformers import LlamaConfig

from pagemesh.engine import prepared
from pagemesh.engine.fallback_loading import load_fallback
from pagemesh.engine.forward import Decoder
from pagemesh.engine.loading import LoadedModel, load_model
from pagemesh.kernels.linear import slim
from pagemesh.kernels.linear.packed import unpack_linear
from pagemesh.kernels.native.library import CpuLevel
from pagemesh.kernels.ops import KvPool, ragged_batch
from pagemesh.kernels.weight_types import AskedType, WeightType

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
FILE = "model.safetensors"


def load(folder: Path, weight_type: AskedType = "float32") -> LoadedModel:
    cache = folder.parent / "cache"
    return load_model(folder, name="tiny", page_size=16, cache=cache, weight_type=weight_type)


def kept_as(dtype: torch.dtype) -> WeightType:
    """What matrices of a checkpoint in ``dtype`` are kept as, on this machine."""
    if dtype is torch.float16:
        return "float16"
    return "slim_bfloat16" if slim.pays() else "bfloat16"


def widen(folder: Path) -> None:
    """Write the tensors of a checkpoint as float32."""
    tensors = {name: own.float() for name, own in load_file(folder / FILE).items()}
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def logits_from(decoder: Decoder, pool: KvPool) -> torch.Tensor:
    """Of a step over several prompts, as one native call where there is one."""
    pages = Pages(pool)
    tokens = [some_tokens(count, vocab=VOCAB, seed=count) for count in (70, 3, 1)]
    tables = [pages.table(len(own)) for own in tokens]
    batch = ragged_batch(tables, [0] * 3, [len(own) for own in tokens], 16)
    joined = torch.from_numpy(np.concatenate(tokens).astype(np.int64))
    _, whole = decoder.step(joined, batch, torch.arange(batch.rows), pool, logits=True)
    apart = logits_of(decoder, pool, [(t, own, 0) for t, own in zip(tables, tokens, strict=True)])
    assert whole is not None
    assert torch.equal(whole, torch.cat(apart))
    return whole


@HALVES
@pytest.mark.parametrize(
    "name",
    [
        "llama-tied-biased",
        "qwen3-head-norm",
        "phi3-fused",
        "granite-factors-tied-biased",
    ],
)
def test_a_step_has_the_bits_of_the_same_weights_in_float32(
    name: str,
    dtype: torch.dtype,
    level: CpuLevel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_twin(tmp_path / "half", twins()[name], dtype=dtype)
    save_twin(tmp_path / "wide", twins()[name], dtype=dtype)
    widen(tmp_path / "wide")
    half = load_decoder(tmp_path / "half")
    with monkeypatch.context() as patched:
        patched.setattr(prepared, "exact_type", lambda *parts: "float32")
        wide = load_decoder(tmp_path / "wide")
    assert half[0].weights.layers[0].gate_up.weight_type == kept_as(dtype)
    assert wide[0].weights.layers[0].gate_up.weight_type == "float32"
    assert torch.equal(logits_from(*half), logits_from(*wide))


@HALVES
def test_a_checkpoint_in_float32_whose_values_are_halves_is_kept_as_these(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    save_twin(tmp_path / "model", LlamaConfig(**SHAPE), dtype=dtype)
    widen(tmp_path / "model")
    assert load(tmp_path / "model").weights.head.weight_type == kept_as(dtype)


@HALVES
def test_matrices_and_embeddings_stay_halves_and_take_half_of_the_memory(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    twin = save_twin(tmp_path / "model", LlamaConfig(**SHAPE, attention_bias=True), dtype=dtype)
    own, layer = load(tmp_path / "model").weights, twin.model.layers[1]
    assert own.layers[1].mlp_norm.dtype is own.layers[1].output.bias.dtype is torch.float32
    for packed, weight in (
        (own.head, twin.lm_head.weight), (own.layers[1].down, layer.mlp.down_proj.weight),
    ):  # fmt: skip
        assert packed.weight_type == kept_as(dtype)
        assert packed.panels.nbytes < 0.6 * 4 * weight.numel()
        assert torch.equal(unpack_linear(packed), weight)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if FILE in line]
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in mapped]
    address = own.embedding.data_ptr()
    assert any(low <= address < high for low, high in ranges), "mapped from the checkpoint"


def test_a_matrix_of_parts_of_several_types_loses_nothing(tmp_path: Path) -> None:
    save_twin(tmp_path / "model", LlamaConfig(**SHAPE), dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "model" / FILE)
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)]
    tensors[names[0]] = tensors[names[0]].to(torch.float16) * (1 + 2**-9)
    tensors[names[1]] = tensors[names[1]].float() + 1e-4
    save_file(tensors, tmp_path / "model" / FILE, metadata={"format": "pt"})
    layers = load(tmp_path / "model").weights.layers
    for layer, name in zip(layers[:2], names, strict=True):
        gate = tensors[name.replace("up_proj", "gate_proj")]
        joined = torch.cat([gate.float(), tensors[name].float()])
        assert torch.equal(unpack_linear(layer.gate_up), joined)
    assert layers[1].gate_up.weight_type == "float32"
    assert [layer.down.weight_type for layer in layers[:2]] == [kept_as(torch.bfloat16)] * 2


def test_a_checkpoint_in_float32_is_rounded_when_that_is_asked_for_and_is_another_root(
    tmp_path: Path,
) -> None:
    twin = save_twin(tmp_path / "model", LlamaConfig(**SHAPE))
    exact, rounded = load(tmp_path / "model"), load(tmp_path / "model", "bfloat16")
    weight = twin.model.layers[0].mlp.down_proj.weight
    assert exact.weights.layers[0].down.weight_type == "float32"
    assert rounded.weights.layers[0].down.weight_type == kept_as(torch.bfloat16)
    found = unpack_linear(rounded.weights.layers[0].down)
    assert torch.equal(found, weight.to(torch.bfloat16).float())
    assert exact.root != rounded.root == load(tmp_path / "model", "bfloat16").root


@HALVES
@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "GPTNeoXForCausalLM"])
def test_the_fallback_keeps_halves_too(
    tmp_path: Path, architecture: str, dtype: torch.dtype
) -> None:
    kind = type(save_fallback_twin(tmp_path / "model", architecture, dtype=dtype))
    # Read again: the one that was saved has its rotation in half precision too.
    twin = kind.from_pretrained(
        tmp_path / "model", dtype=torch.float32, attn_implementation="eager"
    )
    model, decoder = load_fallback(
        tmp_path / "model", name="m", page_size=16, cache=tmp_path / "cache"
    )
    [made] = (tmp_path / "cache").glob("*.safetensors")
    kept = {own.dtype for name, own in load_file(made).items() if name.endswith(".panels")}
    assert kept == {torch.uint8 if kept_as(dtype) == "slim_bfloat16" else dtype}
    pool = KvPool.allocate(model.layout, 4)
    batch = ragged_batch([np.arange(4, dtype=np.uint32)], [0], [60], 16)
    tokens = torch.from_numpy(some_tokens(60, vocab=VOCAB).astype(np.int64))
    with torch.inference_mode():
        expected = twin(input_ids=tokens[None], use_cache=False).logits[0]
        _, found = decoder.step(tokens, batch, torch.arange(60), pool, logits=True)
    assert found is not None
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
