"""A configuration becomes a decoder, or a sentence that says why not."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.unit.engine.models import LLAMA3_ROPE, SHAPE, YARN_ROPE, twins
from transformers import (
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from pagemesh.engine.coverage import LEAN
from pagemesh.engine.model import context_tokens_of, decoder_config
from pagemesh.wire.errors import ConfigError


def named(config: Any, architecture: str) -> Any:
    config.architectures = [architecture]
    return config


def llama(**changes: Any) -> Any:
    return named(LlamaConfig(**{**SHAPE, **changes}), "LlamaForCausalLM")


def refusal(config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        decoder_config(config, where="model here")
    return str(caught.value)


def test_the_three_architectures_differ_where_they_should() -> None:
    plain = decoder_config(llama(), where="")
    biased = decoder_config(named(Qwen2Config(**SHAPE), "Qwen2ForCausalLM"), where="")
    normed = decoder_config(named(Qwen3Config(**SHAPE, head_dim=24), "Qwen3ForCausalLM"), where="")
    assert (plain.qkv_bias, plain.head_norm, plain.head_dim) == (False, False, 16)
    assert (biased.qkv_bias, biased.output_bias, biased.head_norm) == (True, False, False)
    assert (normed.qkv_bias, normed.head_norm, normed.head_dim) == (False, True, 24)


@pytest.mark.parametrize(("given", "original", "context"), [(512, 512, 2_048), (2_048, 512, 2_048)])
def test_a_context_that_yarn_stretches_is_that_long_whether_it_is_counted_in_or_not(
    given: int, original: int, context: int
) -> None:
    rope = YARN_ROPE | {"factor": 4.0, "original_max_position_embeddings": original}
    made = decoder_config(llama(max_position_embeddings=given, rope_parameters=rope), where="")
    assert made.context_tokens_max == context


def test_yarn_stretches_a_context_where_rotations_differ_by_type_of_layer() -> None:
    rope = YARN_ROPE | {"factor": 4.0}
    config = Olmo3Config(**SHAPE | {"max_position_embeddings": 128}, rope_scaling=rope)
    assert "full_attention" in config.rope_parameters
    assert context_tokens_of(config) == 512


def test_the_longest_context_that_has_tables_is_taken() -> None:
    made = decoder_config(llama(max_position_embeddings=1 << 22), where="")
    assert made.context_tokens_max == 1 << 22


@pytest.mark.parametrize("kind", [MistralConfig, Phi3Config, Qwen2Config])
def test_biases_that_a_family_has_not_are_not_looked_for(kind: Any) -> None:
    stray = {"attention_bias": True, "mlp_bias": True, "pad_token_id": 0, "sliding_window": None}
    name = f"{kind.__name__.removesuffix('Config')}ForCausalLM"
    config = decoder_config(named(kind(**SHAPE, **stray), name), where="")
    assert (config.output_bias, config.mlp_bias) == (False, False)
    assert config.qkv_bias == (kind is Qwen2Config)


def test_what_the_lean_pass_has_not_is_named_with_what_it_has() -> None:
    text = refusal(named(GPT2Config(), "GPT2LMHeadModel"))
    assert "GPT2LMHeadModel" in text
    assert "GraniteForCausalLM, LlamaForCausalLM" in text


def test_a_configuration_without_an_architecture_is_refused() -> None:
    assert "(none named)" in refusal(LlamaConfig(**SHAPE))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "'gelu'"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "dynamic",
        ),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "wide"}}, "'wide'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "wrong kind"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}},
            "no numbers",
        ),
        ({"head_dim": 1024}, "1024"),
        ({"head_dim": -16}, "head width -16 is not an even number"),
        ({"num_hidden_layers": 0}, "model here: num_hidden_layers is 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps is inf"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ({"max_position_embeddings": (1 << 22) + 1}, "is 4194305 tokens; up to 4194304 have"),
        ({"max_position_embeddings": 10**18}, "up to 4194304 have tables of rotations"),
        ({"rope_parameters": YARN_ROPE | {"factor": 4e9}}, "what rope_parameters make of it, is"),
    ],
)
def test_what_the_engine_cannot_run_is_refused_by_name(
    changes: dict[str, Any], reason: str
) -> None:
    assert reason in refusal(llama(**changes))


def test_a_configuration_of_another_family_than_its_architecture_is_refused() -> None:
    text = refusal(named(GPT2Config(), "LlamaForCausalLM"))
    assert "does not describe a model of architecture LlamaForCausalLM" in text


def test_a_model_with_the_biases_or_windows_of_another_family_is_refused() -> None:
    """Both have every field that the other needs."""
    for config, architecture in (
        (Qwen2Config(**SHAPE), "LlamaForCausalLM"),
        (LlamaConfig(**SHAPE), "Qwen2ForCausalLM"),
    ):
        text = refusal(named(config, architecture))
        assert architecture in text and f"its model_type is {config.model_type!r}" in text


def test_a_quantised_checkpoint_is_refused() -> None:
    config = llama()
    config.quantization_config = {"quant_method": "awq"}
    assert "quantised" in refusal(config)


def test_sliding_windows_are_refused_where_a_layer_uses_them() -> None:
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    assert "sliding_attention" in refusal(named(Qwen2Config(**SHAPE, **window), "Qwen2ForCausalLM"))
    unused = named(Qwen2Config(**SHAPE, sliding_window=8), "Qwen2ForCausalLM")
    assert decoder_config(unused, where="").layer_count == 3


def test_every_rope_variant_has_angles_of_its_own() -> None:
    ropes = {decoder_config(llama(), where="").rope.canonical()}
    for changes in ({"rope_theta": 5e5, "rope_type": "default"}, LLAMA3_ROPE):
        ropes.add(decoder_config(llama(rope_parameters=changes), where="").rope.canonical())
    assert len(ropes) == 3


def test_the_digest_tells_apart_what_gives_weights_another_meaning() -> None:
    digests = {
        decoder_config(llama(**changes), where="").digest()
        for changes in ({}, {"rms_norm_eps": 1e-5}, {"num_key_value_heads": 4})
    }
    assert len(digests) == 3
    assert decoder_config(llama(), where="").digest() in digests


def test_every_lean_architecture_has_a_twin_in_the_logit_tests() -> None:
    kinds = {name.removesuffix("ForCausalLM").lower(): name for name in LEAN}
    seen = set()
    for name, config in twins().items():
        config = named(config, kinds[config.model_type])
        assert decoder_config(config, where=name).layer_count == 3
        seen.add(config.architectures[0])
    assert seen == set(LEAN)
