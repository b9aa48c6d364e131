"""Decoders of ``transformers`` give over our pages the logits that they give without."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.engine.fallback_twins import save_fallback_twin
from tests.unit.engine.harness import PAGE_SIZE, Pages, some_tokens
from tests.unit.engine.models import VOCAB

from pagemesh.engine import fallback, fallback_loading
from pagemesh.engine.coverage import FALLBACK_TESTED
from pagemesh.engine.executor import StepDecoder
from pagemesh.engine.fallback import FallbackDecoder, PagedStep
from pagemesh.engine.loading import LoadedModel, ServedModel
from pagemesh.engine.opening import open_model
from pagemesh.kernels.layout import KvDtype
from pagemesh.kernels.ops import KvPool, PageLayout, pack_linear, ragged_batch
from pagemesh.wire.errors import ConfigError
from pagemesh.wire.tokens import U32

TOLERANCE = 1e-4
"""Of the widest logit: float32 in another order of summation."""
FILE_BYTES_MAX = 256 << 10
"""Less than the weights of any model here."""


def opened(
    folder: Path, *, page_size: int = PAGE_SIZE, kv_dtype: KvDtype = "float32"
) -> tuple[ServedModel, StepDecoder]:
    cache = folder.parent / "cache"
    return open_model(
        folder, name="tiny", page_size=page_size, cache=cache, deterministic=False,
        kv_dtype=kv_dtype,
    )  # fmt: skip


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        opened(folder)
    text = str(caught.value)
    assert "\n" not in text
    return text


def expected_logits(twin: Any, tokens: U32) -> torch.Tensor:
    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        logits: torch.Tensor = twin(ids, use_cache=False).logits[0]
    return logits


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


def stepped(
    decoder: StepDecoder, pool: KvPool, rows: list[tuple[U32, U32, int]]
) -> list[torch.Tensor]:
    """One step of ``rows`` (page table, tokens, start): logits [tokens, vocab] each."""
    counts = [len(tokens) for _, tokens, _ in rows]
    batch = ragged_batch(
        [table for table, _, _ in rows], [start for _, _, start in rows], counts, PAGE_SIZE
    )
    tokens = torch.from_numpy(np.concatenate([own for _, own, _ in rows]).astype(np.int64))
    with torch.inference_mode():
        _, logits = decoder.step(tokens, batch, torch.arange(batch.rows), pool, logits=True)
    assert logits is not None
    return list(torch.split(logits, counts))


@pytest.mark.parametrize("architecture", FALLBACK_TESTED)
def test_chunks_and_single_tokens_of_several_sequences_give_the_logits_of_transformers(
    architecture: str, tmp_path: Path
) -> None:
    twin = save_fallback_twin(tmp_path / "model", architecture)
    model, decoder = opened(tmp_path / "model")
    assert isinstance(decoder, FallbackDecoder)
    pool = KvPool.allocate(model.layout, 32)
    pages = Pages(pool)
    sequences = [
        (pages.table(count), some_tokens(count, vocab=VOCAB, seed=count), expected)
        for count in (90, 33, 57)
        for expected in [expected_logits(twin, some_tokens(count, vocab=VOCAB, seed=count))]
    ]
    done = [0, 0, 0]
    # Longer than any window, then ragged: chunks beside single tokens.
    for sizes in [(60, 17, 1), (1, 1, 40), (7, 1, 1), *[(1, 1, 1)] * 3]:
        rows = [
            (table, tokens[start : start + size], start)
            for (table, tokens, _), start, size in zip(sequences, done, sizes, strict=True)
        ]
        for got, (_, _, wanted), start in zip(
            stepped(decoder, pool, rows), sequences, done, strict=True
        ):
            assert relative_error(got, wanted[start : start + len(got)]) < TOLERANCE
        done = [start + size for start, size in zip(done, sizes, strict=True)]


def test_the_sliding_window_of_a_lean_family_takes_the_fallback_and_is_kept(
    tmp_path: Path,
) -> None:
    twin = save_fallback_twin(tmp_path / "model", "MistralForCausalLM")
    assert twin.config.sliding_window == 24
    model, decoder = opened(tmp_path / "model")
    assert isinstance(decoder, FallbackDecoder)
    pool = KvPool.allocate(model.layout, 8)
    tokens = some_tokens(100, vocab=VOCAB)
    table = Pages(pool).table(100)
    wanted = expected_logits(twin, tokens)
    (first,) = stepped(decoder, pool, [(table, tokens[:80], 0)])
    (rest,) = stepped(decoder, pool, [(table, tokens[80:], 80)])
    assert relative_error(torch.cat([first, rest]), wanted) < TOLERANCE


def test_a_lean_family_without_windows_takes_the_lean_path(tmp_path: Path) -> None:
    save_fallback_twin(tmp_path / "model", "MistralForCausalLM", sliding_window=None)
    model, _ = opened(tmp_path / "model")
    assert isinstance(model, LoadedModel)


@pytest.mark.parametrize(
    ("architecture", "stored_apart"),
    [("PhiForCausalLM", False), ("PhiForCausalLM", True), ("BertLMHeadModel", False)],
)
def test_a_head_said_to_be_tied_is_what_transformers_makes_of_it(
    architecture: str, stored_apart: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    # Phi's head has a bias, which is never the embeddings'; Bert's has two names.
    twin = save_fallback_twin(folder, architecture, tie_word_embeddings=True)
    if stored_apart:
        tensors = load_file(folder / "model.safetensors")
        own = tensors["model.embed_tokens.weight"].flip(0).clone()
        save_file(tensors | {"lm_head.weight": own}, folder / "model.safetensors", {"format": "pt"})
        twin = type(twin).from_pretrained(str(folder), dtype=torch.float32)
    model, decoder = opened(folder)
    pool = KvPool.allocate(model.layout, 4)
    tokens = some_tokens(40, vocab=VOCAB)
    (got,) = stepped(decoder, pool, [(Pages(pool).table(40), tokens, 0)])
    assert relative_error(got, expected_logits(twin, tokens)) < TOLERANCE


def test_heads_fewer_and_narrower_than_a_page_has_room_for_change_nothing() -> None:
    own = PageLayout(layers=1, kv_heads=2, head_dim=8, page_size=4)
    results = []
    for layout in (own, replace(own, kv_heads=4, head_dim=24)):
        pool = KvPool.allocate(layout, 4)
        random = torch.Generator().manual_seed(0)
        q = torch.randn((1, 8, 13, 8), generator=random)
        k, v = torch.randn((2, 1, 2, 13, 8), generator=random)
        batch = ragged_batch([Pages(pool).table(13)[:4]], [0], [13], 4)
        layer = SimpleNamespace(layer_idx=0)
        out, _ = fallback.attend(
            layer, q, k, v, None, scaling=0.3, softcap=2.0, pagemesh=PagedStep(batch, pool)
        )
        results.append(out)
    assert results[0].shape == (1, 13, 8, 8)
    assert torch.allclose(results[0], results[1], atol=1e-6)


def test_a_model_with_values_of_the_wrong_kind_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    fields = {"architectures": ["MistralForCausalLM"], "sliding_window": "wide"}
    text = json.dumps(fields | {"max_position_embeddings": 8})
    (tmp_path / "model" / "config.json").write_text(text)
    assert "wrong kind" in refusal(tmp_path / "model")


def test_only_wanted_rows_have_logits_and_hidden_states_give_the_same_later(
    tmp_path: Path,
) -> None:
    save_fallback_twin(tmp_path / "model", "Gemma2ForCausalLM")
    model, decoder = opened(tmp_path / "model")
    pool = KvPool.allocate(model.layout, 4)
    tokens = torch.arange(40)
    batch = ragged_batch([Pages(pool).table(40)], [0], [40], PAGE_SIZE)
    with torch.inference_mode():
        hidden, logits = decoder.step(tokens, batch, torch.tensor([3, 39]), pool, logits=True)
        assert logits is not None
        assert logits.shape == (2, VOCAB)
        assert torch.allclose(decoder.logits(hidden[1:]), logits[1:], atol=1e-5)
        _, none = decoder.step(tokens, batch, torch.tensor([3, 39]), pool, logits=False)
    assert none is None


def test_a_bias_that_two_matrices_share_is_added_by_both() -> None:
    first, second = torch.nn.Linear(3, 5), torch.nn.Linear(5, 5)
    second.bias = first.bias
    model = torch.nn.Sequential(first, second)
    tensors = {
        "0.panels": pack_linear(first.weight).panels, "0.bias": first.bias.detach(),
        "1.panels": pack_linear(second.weight).panels,
    }  # fmt: skip
    x = torch.randn(4, 3)
    with torch.inference_mode():
        expected = model(x)
        fallback_loading._pack(model, tensors)
        assert all(type(module) is fallback.PackedModule for module in model)
        torch.testing.assert_close(model(x), expected)


def test_weights_are_mapped_from_one_file_that_a_second_process_finds(tmp_path: Path) -> None:
    save_fallback_twin(tmp_path / "model", "GemmaForCausalLM", dtype=torch.bfloat16)
    first, _ = opened(tmp_path / "model")
    (prepared,) = (tmp_path / "cache").glob("*.safetensors")
    inode = prepared.stat().st_ino
    second, _ = opened(tmp_path / "model")
    assert prepared.stat().st_ino == inode, "it was not written again"
    assert first.root == second.root
    assert str(prepared) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GemmaForCausalLM"])
def test_weights_that_find_no_room_are_refused_in_one_line_and_leave_nothing_half_written(
    architecture: str, tmp_path: Path
) -> None:
    save_fallback_twin(tmp_path / "model", architecture)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, before[1]))
    try:
        text = refusal(tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot write prepared weights" in text
    left = sum(path.stat().st_size for path in (tmp_path / "cache").iterdir())
    assert left < 1_024, "digests and locks"
    opened(tmp_path / "model")


def test_the_root_is_another_for_anything_that_changes_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_fallback_twin(folder, "GemmaForCausalLM")
    roots = [opened(folder)[0].root]
    changes: list[dict[str, Any]] = [{"page_size": 2 * PAGE_SIZE}, {"kv_dtype": "float16"}]
    roots += [opened(folder, **change)[0].root for change in changes]
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-3}))
    roots.append(opened(folder)[0].root)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    roots.append(opened(folder)[0].root)
    (folder / "tokenizer.json").write_text('{"version": "2.0"}')
    roots.append(opened(folder)[0].root)
    assert len(set(roots)) == len(roots) == 6


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("DiffLlamaForCausalLM", "has it twice"),
        ("PhimoeForCausalLM", "does not tell attention its window of 24 tokens"),
        ("GptOssForCausalLM", "takes sinks (s_aux), which are not there yet"),
        ("NemotronForCausalLM", "does not tell its attention which pages"),
    ],
)
def test_what_does_not_compute_the_same_over_pages_is_refused_at_loading(
    architecture: str, reason: str, tmp_path: Path
) -> None:
    save_fallback_twin(tmp_path / "model", architecture)
    text = refusal(tmp_path / "model")
    assert architecture in text
    assert reason in text
    assert "and others run (ops/docs/models.md)" in text


def test_code_of_transformers_that_fails_over_pages_is_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_fallback_twin(tmp_path / "model", "GemmaForCausalLM")
    monkeypatch.setattr(fallback, "_Output", {}.__getitem__)
    text = refusal(tmp_path / "model")
    assert "its code in transformers fails there (KeyError: " in text
    assert "ops/docs/models.md" in text


def test_a_window_that_masks_alone_have_is_refused_whatever_the_switch_says(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    save_fallback_twin(
        tmp_path / "model", "SmolLM3ForCausalLM", use_sliding_window=False, layer_types=kinds
    )
    assert "its layer 0 does not tell attention its window of 24 tokens" in refusal(
        tmp_path / "model"
    )


def test_a_model_with_other_logits_over_pages_than_without_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_fallback_twin(tmp_path / "model", "GemmaForCausalLM")
    monkeypatch.setattr(fallback, "paged_attention", lambda q, *_arguments, **_named: q)
    assert "of the widest from those without pages" in refusal(tmp_path / "model")


def test_weights_that_make_no_numbers_are_not_said_to_be_a_fault_of_the_architecture(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    save_fallback_twin(folder, "GemmaForCausalLM")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = refusal(folder)
    assert text.endswith("its logits are no numbers, without pages too: its weights are broken")


@pytest.mark.parametrize(
    ("architecture", "fields", "reason"),
    [
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": 512}, "MLA"),
        ("MambaForCausalLM", {"state_size": 16}, "SSM"),
        ("JambaForCausalLM", {"attn_layer_period": 8}, "hybrid"),
        ("T5ForConditionalGeneration", {}, "T5ForConditionalGeneration is not supported"),
        ("BloomForCausalLM", {}, "work over pages; Llama, Mistral"),
        ("NobodysForCausalLM", {}, "does not have it"),
        ("Llama4ForCausalLM", {"layer_types": ["chunked_attention"]}, "chunked_attention"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
         "'dynamic'"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "what comes later"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope"}}, "'longrope'"),
        ("GemmaForCausalLM", {"quantization_config": {"bits": 4}}, "quantised"),
    ],
)  # fmt: skip
def test_what_pages_cannot_hold_is_refused_by_its_configuration(
    architecture: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    text = json.dumps({"architectures": [architecture], **fields})
    (tmp_path / "model" / "config.json").write_text(text)
    assert reason in refusal(tmp_path / "model")


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2", "I8", "U8"])
def test_codes_are_not_taken_for_weights_whatever_the_configuration_says(
    kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    save_fallback_twin(folder, "MixtralForCausalLM")
    dtypes = {
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8,
        "U8": torch.uint8,
    }  # fmt: skip
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].abs().mul(100).to(dtypes[kind])
    scale = {f"{name}_scale": torch.tensor([0.01])}
    save_file(tensors | scale, folder / "model.safetensors", metadata={"format": "pt"})
    text = refusal(folder)
    assert f"tensor {name} is {kind}: quantised checkpoints are not supported" in text


def test_masks_of_whole_numbers_beside_the_weights_change_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_fallback_twin(folder, "GPT2LMHeadModel")
    tensors = load_file(folder / "model.safetensors")
    mask = torch.ones((1, 1, 8, 8), dtype=torch.uint8).tril()
    stray = {"transformer.h.0.attn.bias": mask, "steps": torch.ones(2, dtype=torch.int64)}
    save_file(tensors | stray, folder / "model.safetensors", metadata={"format": "pt"})
    model, _ = opened(folder)
    assert model.layout.layers == 4


def test_a_scaling_that_transformers_reads_beside_another_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_fallback_twin(folder, "GemmaForCausalLM")
    fields = json.loads((folder / "config.json").read_text())
    fields["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    assert fields["rope_parameters"]["rope_type"] == "default"
    (folder / "config.json").write_text(json.dumps(fields))
    assert "'dynamic' is not supported" in refusal(folder)


@pytest.mark.parametrize("context", [0, -1])
def test_a_model_without_a_context_is_refused_in_one_line(context: int, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_fallback_twin(folder, "GemmaForCausalLM")
    fields = json.loads((folder / "config.json").read_text())
    fields["max_position_embeddings"] = context
    (folder / "config.json").write_text(json.dumps(fields))
    assert f"max_position_embeddings is {context}" in refusal(folder)


def test_deterministic_mode_is_refused_with_its_reason(tmp_path: Path) -> None:
    save_fallback_twin(tmp_path / "model", "GemmaForCausalLM")
    with pytest.raises(ConfigError, match="leave it out"):
        open_model(
            tmp_path / "model", name="tiny", page_size=16, cache=tmp_path, deterministic=True
        )
