"""Models whose K and V pages cannot hold, or that have none, are refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.cli.planning.test_shape import shape, transformers_config

from pagemesh.cli.planning.shape import read_shape
from pagemesh.wire.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "kv_lora_rank.*MLA"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"cross_attention_layers": [1, 4]}, "cross_attention_layers.*K and V of images"),
        ({"model_type": "mllama_text_model"}, "cross_attention_layers"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"num_key_value_heads": [2, 2, 4, 4, 4, 4]}, "num_key_value_heads differs by layer"),
        (
            {"num_key_value_heads_per_layer": [2, 2, 4, 4, 4, 4], "num_key_value_heads": 4},
            "num_key_value_heads_per_layer differs by layer",
        ),
        ({"num_key_value_heads": 2, "swa_num_key_value_heads": 4}, "swa_num_key_value_heads is"),
        ({"head_dim": 192, "v_head_dim": 128}, "v_head_dim is not 192"),
        ({"hybrid_layer_pattern": [0, 1, 1, 1, 1, 0]}, "hybrid_layer_pattern"),
        ({"per_layer_config": {"05": {"head_dim": 512}}}, "per_layer_config"),
        ({"use_cla": True, "cla_share_factor": 2}, "use_cla.*share K and V"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"num_hidden_layers": "six"}, "num_hidden_layers is 'six'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is '0'"),
        ({"num_hidden_layers": (1 << 16) + 1}, "has 65,537 layers; up to 65,536"),
        ({"num_hidden_layers": True}, "num_hidden_layers is 'True'"),
        ({"hidden_size": 66}, "66 is no multiple of 4"),
        ({"layer_types": ["full_attention"] * 5}, "names 5 of 6 layers"),
        ({"layer_types": ["linear_attention"] * 6}, "layers of type linear_attention"),
        ({"attn_layer_period": 8}, "attn_layer_period"),
        ({"full_attn_idxs": [2, 5], "conv_L_cache": 3}, "full_attn_idxs says that not every layer"),
        ({"attn_layer_indices": [1]}, "attn_layer_indices says that not every layer"),
        ({"attn_type_list": [1, 0, 1, 1, 1, 1]}, "attn_type_list says that not every layer"),
        ({"layers_block_type": ["attention", "mamba"] * 3}, "layers_block_type says that not"),
        ({"layer_group_size": 5}, "layer_group_size says that not every layer"),
        ({"attention_hidden_size": 64}, "attention_hidden_size says that not every layer"),
        ({"rescale_every": 6}, "rescale_every says that not every layer"),
        ({"decay_low_rank_dim": 64}, "decay_low_rank_dim says that not every layer"),
        ({"attn_mode": "chunk", "expand_k": 0.5}, "expand_k says that not every layer"),
        ({"attn_mode": "chunk"}, "attn_mode says that not every layer"),
        (
            {"total_ut_steps": 4, "layer_types": ["full_attention"] * 6},
            "total_ut_steps says that the model runs its layers several times",
        ),
        ({"compress_ratios": [0, 0, 4, 8, 4, 8]}, "compress_ratios says .* groups of tokens"),
        ({"compress_rates": {"csa": 4}}, "compress_rates says"),
        ({"compress_rate_hca": 128}, "compress_rate_hca says"),
        ({"layer_types": ["\x1b[31m\n"] * 6}, r"layers of type '\\x1b\[31m\\n' keep"),
        ({"model_type": "gpt_neo", "attention_types": [[["local"], 1 << 40]]}, "no list of layers"),
        ({"model_type": "gpt_neo", "attention_types": [["local", 6]]}, "no list of layers"),
        ({"model_type": "gpt_neo", "attention_layers": ["local"] * 5}, "names 5 of 6 layers"),
        ({"model_type": "llama4_text", "no_rope_layers": [1]}, "names 1 of 6 layers"),
        ({"model_type": "llama4_text", "no_rope_layers": 4}, "no_rope_layers is no list"),
        ({"state_size": 16, "num_attention_heads": None}, "state_size says that not every layer"),
        (
            {"max_position_embeddings": None},
            "how long the context may be; add max_position_embeddings",
        ),
        ({"model_type": "new", "hidden_size": None}, "has no hidden_size"),
        ({"sliding_window": 32, "sliding_window_pattern": "x"}, "sliding_window_pattern is 'x'"),
    ],
)
def test_what_pages_cannot_hold_or_makes_no_sense_is_refused(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        shape(**fields)
    assert str(caught.value).startswith("model test: ")


def test_a_switch_that_is_off_refuses_nothing() -> None:
    assert shape(use_cla=False, cla_share_factor=2) == shape()
    assert shape(swa_num_key_value_heads=4, v_head_dim=16) == shape()
    assert shape(type_vocab_size=2, is_decoder=True) == shape()
    assert shape(attn_type_list=[1] * 6, layers_block_type=["attention"] * 6) == shape()
    assert shape(total_ut_steps=1, layer_group_size=1, attn_layer_period=1) == shape()
    assert shape(v_head_dim=0, kv_lora_rank=None, use_mla=False, compress_ratios=[]) == shape()


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("albert", "AlbertModel"), ("bert", "BertModel"), ("deberta-v2", "DebertaV2Model"),
        ("clip", "CLIPModel"), ("distilbert", "DistilBertForSequenceClassification"),
        ("modernbert", "ModernBertModel"), ("siglip", "SiglipModel"),
        ("vit", "ViTForImageClassification"), ("xlnet", "XLNetLMHeadModel"),
        ("electra", "ElectraForPreTraining"), ("mpnet", "MPNetModel"),
        ("nomic_bert", "NomicBertModel"), ("roberta", "RobertaForQuestionAnswering"),
        ("xlm-roberta", "XLMRobertaForSequenceClassification"),
    ],
)  # fmt: skip
def test_an_encoder_is_refused_whatever_its_head(family: str, architecture: str) -> None:
    from transformers import CONFIG_MAPPING

    file = CONFIG_MAPPING[family]().to_dict() | {"model_type": family}
    with pytest.raises(ConfigError, match=f"model test: {architecture} is an encoder"):
        read_shape(file | {"architectures": [architecture]}, "model test")
    with pytest.raises(ConfigError, match=f"model test: {family} is an encoder"):
        read_shape(file | {"architectures": None}, "model test")


def test_layers_that_look_at_images_are_refused_where_the_decoder_is_a_part() -> None:
    whole = transformers_config("mllama_text_model", num_hidden_layers=10).to_dict()
    with pytest.raises(ConfigError, match="model test: cross_attention_layers"):
        read_shape({"model_type": "mllama", "text_config": whole}, "model test")
    assert shape(cross_attention_layers=[]).layer_count == 6
