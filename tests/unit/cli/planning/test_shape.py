"""Shapes are read as each family's own code reads them, or refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from pagemesh.cli.planning.families import TEXT_PARTS
from pagemesh.cli.planning.shape import ModelShape, read_shape
from pagemesh.cli.planning.weights import parameter_count
from pagemesh.wire.errors import ConfigError

BASE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip


def shape(**fields: Any) -> ModelShape:
    return read_shape({**BASE, **fields}, "model test")


def test_heads_are_the_models_when_nothing_else_is_said() -> None:
    made = shape()
    assert (made.kv_head_count, made.head_dim, made.sharing) == (4, 16, "multi-head")


def test_grouped_and_multi_query_heads_are_told_apart() -> None:
    assert shape(num_key_value_heads=2).sharing == "grouped"
    assert shape(num_key_value_heads=1).sharing == "multi-query"


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_yarn_stretches_a_context_that_is_given_as_it_was_before(key: str, kind: str) -> None:
    rope = {kind: "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert shape(**{key: rope}).context_tokens_max == 512
    counted = shape(max_position_embeddings=512, **{key: rope})
    assert counted.context_tokens_max == 512
    by_layer = {"sliding_attention": {kind: "default"}, "full_attention": rope}
    assert shape(**{key: by_layer}).context_tokens_max == 512
    linear = shape(**{key: {kind: "linear", "factor": 4.0}})
    assert linear.context_tokens_max == 128


@pytest.mark.parametrize("factor", ["4", None, math.inf, math.nan, 0, 1 << 80])
@pytest.mark.parametrize("original", [None, 128, "128", 1 << 1_100])
def test_what_makes_no_sense_stretches_nothing(factor: object, original: object) -> None:
    rope = {"type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    assert shape(rope_scaling=rope).context_tokens_max == 128


def test_an_explicit_head_width_wins_over_the_hidden_size() -> None:
    assert shape(head_dim=128).head_dim == 128
    assert shape(head_dim=None).head_dim == 16


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024},
         (12, 12, 64, 1024)),
        ({"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144,
          "n_positions": 8192, "multi_query": True}, (40, 1, 128, 8192)),
        ({"model_type": "bloom", "n_layer": 70, "num_attention_heads": 112, "n_embed": 14336,
          "seq_length": 4096}, (70, 112, 128, 4096)),
        ({"model_type": "bloom", "n_layer": 24, "n_head": 16, "n_embed": 1024},
         (24, 16, 64, 2048)),
        ({"model_type": "step3p5", "num_hidden_layers": 45, "num_attention_heads": 64,
          "num_attention_groups": 8, "hidden_size": 4096, "head_dim": 128,
          "model_max_length": 262144}, (45, 8, 128, 262144)),
        ({"model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71,
          "num_kv_heads": 71, "hidden_size": 4544, "multi_query": True,
          "new_decoder_architecture": False}, (32, 1, 64, 2048)),
        ({"model_type": "falcon", "num_hidden_layers": 60, "num_attention_heads": 128,
          "num_kv_heads": 8, "hidden_size": 8192, "multi_query": True,
          "new_decoder_architecture": True}, (60, 8, 64, 2048)),
        ({"model_type": "RefinedWebModel", "n_layer": 32, "n_head": 71, "hidden_size": 4544,
          "multi_query": True}, (32, 1, 64, 2048)),
        ({"model_type": "RefinedWeb", "n_layer": 60, "n_head": 128, "n_head_kv": 8,
          "hidden_size": 8192}, (60, 8, 64, 2048)),
        ({"model_type": "mpt", "n_layers": 32, "n_heads": 32, "d_model": 4096,
          "max_seq_len": 2048, "attn_config": {"kv_n_heads": 8}}, (32, 8, 128, 2048)),
        ({"model_type": "chatglm", "num_layers": 28, "num_attention_heads": 32,
          "hidden_size": 4096, "kv_channels": 128, "seq_length": 32768,
          "multi_query_attention": True, "multi_query_group_num": 2}, (28, 2, 128, 32768)),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text",
          "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}},
         (34, 4, 256, 131072)),
        ({"model_type": "mpt", "n_layers": 32, "n_heads": 32, "d_model": 4096, "max_seq_len": 2048,
          "attn_config": {"attn_type": "multiquery_attention"}}, (32, 1, 128, 2048)),
        ({"model_type": "mpt", "n_layers": 32, "n_heads": 32, "d_model": 4096, "max_seq_len": 2048,
          "attn_config": {"attn_type": "multihead_attention"}}, (32, 32, 128, 2048)),
        ({"model_type": "gpt2", "attention_head_type": "multiquery", "n_embd": 2048, "n_head": 16,
          "n_layer": 24, "n_positions": 2048}, (24, 1, 128, 2048)),
        ({"model_type": "hf_olmo", "d_model": 4096, "n_heads": 32, "n_layers": 32,
          "max_sequence_length": 2048, "multi_query_attention": True}, (32, 1, 128, 2048)),
        ({"model_type": "hf_olmo", "d_model": 4096, "n_heads": 32, "n_layers": 32,
          "max_sequence_length": 2048, "n_kv_heads": 8}, (32, 8, 128, 2048)),
        ({"model_type": "chatglm", "num_layers": 28, "num_attention_heads": 32,
          "hidden_size": 4096, "context_length": 2048, "multi_query_attention": False,
          "multi_query_group_num": 2}, (28, 32, 128, 2048)),
        ({"model_type": "openelm", "n_layers": 4, "n_heads": 4, "head_dim": 64,
          "max_context_length": 2048}, (4, 4, 64, 2048)),
        ({"model_type": "llama", "max_sequence_length": 4096}, (32, 32, 128, 2048)),
        ({"model_type": "mistral", "n_layers": 40, "n_kv_heads": 4}, (40, 4, 128, 131072)),
        ({"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064,
          "max_position_embeddings": 4096}}, (32, 32, 128, 4096)),
        ({"model_type": "llava", "text_config": {"model_type": "mistral", "head_dim": 128,
          "hidden_size": 5120, "num_hidden_layers": 40}}, (40, 8, 128, 131072)),
        ({"model_type": "qwen2_5_omni", "thinker_config": {"text_config": {
          "model_type": "qwen2_5_omni_text", "num_hidden_layers": 28, "num_attention_heads": 28,
          "num_key_value_heads": 4, "hidden_size": 3584, "max_position_embeddings": 32768}}},
         (28, 4, 128, 32768)),
        ({"model_type": "deepseek_vl_v2", "language_config": {"hidden_size": 1280,
          "num_hidden_layers": 12, "num_attention_heads": 10, "num_key_value_heads": 10,
          "use_mla": False, "kv_lora_rank": None, "v_head_dim": 0,
          "max_position_embeddings": 8192}}, (12, 10, 128, 8192)),
    ],
)  # fmt: skip
def test_every_familys_names_are_understood(
    config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    made = read_shape(config, "model test")
    found = (made.layer_count, made.kv_head_count, made.head_dim, made.context_tokens_max)
    assert found == expected


def test_a_field_that_names_a_longer_context_than_counts_is_kept() -> None:
    made = shape(model_max_length=4_096)
    assert (made.context_tokens_max, made.longer_context) == (128, "model_max_length 4,096")
    rope = {"type": "linear", "factor": 4.0}
    assert shape(rope_scaling=rope, max_sequence_length=512).longer_context[-3:] == "512"
    assert shape(model_max_length=128, seq_length=True).longer_context == ""


JUNK = some.one_of(
    some.none(),
    some.booleans(),
    some.integers(-2, 1 << 40),
    some.floats(),
    some.text(max_size=4),
    some.lists(some.integers(-1, 9), max_size=7),
    some.dictionaries(some.text(max_size=3), some.integers(), max_size=3),
)
EVERY_FIELD = (
    "architectures", "model_type", "dtype", "hidden_size", "num_hidden_layers", "head_dim",
    "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "sliding_window",
    "use_sliding_window", "max_window_layers", "sliding_window_pattern", "layer_types",
    "text_config", "attn_config", "multi_query", "intermediate_size", "vocab_size",
    "num_local_experts", "num_experts", "moe_intermediate_size", "mlp_bias", "attention_bias",
    "quantization_config", "tie_word_embeddings", "attention_chunk_size", "kv_lora_rank",
    "llm_config", "language_config", "cross_attention_layers", "v_head_dim", "type_vocab_size",
    "thinker_config", "attn_type_list", "attention_layers", "attention_types", "window_size",
    "no_rope_layers", "no_rope_layer_interval", "model_max_length", "multi_query_attention",
)  # fmt: skip


@given(
    some.sampled_from(
        [
            "llama",
            "mixtral",
            "qwen2",
            "qwen3_moe",
            "falcon",
            "gemma3_text",
            "mpt",
            "gpt_neo",
            "llama4_text",
        ]
    ),
    some.dictionaries(some.sampled_from(EVERY_FIELD), JUNK, max_size=4),
)
@example("llama", {"architectures": 5, "model_type": None})
@example("mixtral", {"num_local_experts": "x", "intermediate_size": 8, "vocab_size": 9})
def test_a_configuration_of_junk_is_refused_and_never_a_crash(
    family: str, fields: dict[str, Any]
) -> None:
    config = {**BASE, "intermediate_size": 96, "vocab_size": 200, "model_type": family, **fields}
    try:
        made = read_shape(config, "model test")
    except ConfigError as error:
        assert str(error).startswith("model test: ")
        return
    assert made.layer_count > 0 and made.kv_head_count > 0 and made.head_dim > 0
    assert 0 <= made.window_layer_count <= made.layer_count
    count = parameter_count(config, made)
    assert count is None or count > 0


def transformers_config(family: str, **fields: Any) -> Any:
    from transformers import CONFIG_MAPPING

    common = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 200,
        "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return CONFIG_MAPPING[family](**(common | fields))


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("mistral", {"head_dim": 32}),
        ("mixtral", {"num_local_experts": 4}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 32}),
        ("gemma", {"head_dim": 16}),
        ("phi3", {}),
    ],
)
def test_parameters_are_counted_as_transformers_makes_them(
    family: str, fields: dict[str, Any]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config = transformers_config(family, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = config.to_dict()
    assert parameter_count(found, read_shape(found, family)) == model.num_parameters()


@pytest.mark.parametrize(
    "family",
    [
        "cohere2", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "llama",
        "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe",
    ],
)  # fmt: skip
def test_a_file_that_leaves_out_what_a_family_assumes_gives_the_same_shape(family: str) -> None:
    from transformers import CONFIG_MAPPING

    sparse = {"hidden_size": 2_048, "num_hidden_layers": 24, "num_attention_heads": 32}
    everything = CONFIG_MAPPING[family](**sparse).to_dict() | {"model_type": family}
    expected = read_shape(everything, family)
    assert read_shape({**sparse, "model_type": family}, family) == expected


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_a_decoder_of_which_a_file_says_nothing_is_the_one_of_its_class(family: str) -> None:
    from transformers import CONFIG_MAPPING

    whole = {"model_type": "llava", "text_config": {"model_type": family}}
    everything = CONFIG_MAPPING[family]().to_dict() | {"model_type": family}
    assert read_shape(whole, family) == read_shape(everything, family)


_READ = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size",
    "max_position_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("common_names", [False, True])
@pytest.mark.parametrize(
    "family",
    [
        "bloom", "codegen", "ctrl", "dbrx", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "gptj",
        "jetmoe", "mpt", "openai-gpt", "xglm",
    ],
)  # fmt: skip
def test_what_a_family_calls_otherwise_is_read_by_both_names(
    family: str, common_names: bool
) -> None:
    """As the family's own class has them, and as it maps them."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[family]()
    file = config.to_dict() | {"model_type": family}
    own_names = {common: own for common, own in config.attribute_map.items() if common in _READ}
    assert own_names
    if common_names:
        for common, own in own_names.items():
            file[common] = file.pop(own)
    made = read_shape(file, family)
    assert made.layer_count == config.num_hidden_layers
    assert made.head_count == config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert made.head_dim == width
    assert made.context_tokens_max == getattr(config, "max_position_embeddings", 2_048)


def test_what_is_no_count_says_nothing_of_parameters() -> None:
    known = {**BASE, "intermediate_size": 8, "vocab_size": 8}
    assert parameter_count(known, shape())
    for vocab in (None, 0, -1, True, 8.0, "8", 10**400):
        assert parameter_count({**known, "vocab_size": vocab}, shape()) is None


def test_a_family_that_is_not_known_by_heart_has_no_parameter_count() -> None:
    assert parameter_count({**BASE, "model_type": "gpt2"}, shape(model_type="gpt2")) is None


@pytest.mark.parametrize("part", TEXT_PARTS)
def test_a_decoder_that_is_a_part_of_a_model_is_not_counted_as_all_of_it(part: str) -> None:
    decoder = {**BASE, "intermediate_size": 96, "vocab_size": 200}
    assert parameter_count(decoder, read_shape(decoder, "alone"))
    whole = {"model_type": "sees", "vision_config": {"hidden_size": 32}, part: decoder}
    made = read_shape(whole, "model test")
    assert (made.family, made.layer_count) == ("llama", 6)
    assert parameter_count(whole, made) is None
