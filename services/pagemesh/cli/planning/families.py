"""What is known of families of models. A new family needs entries here, and seldom code:

names      what families call the same number
ASSUMED    what a family's code assumes where its config.json is silent
refusals   fields and families whose K and V, or other state, pages cannot hold
"""

from __future__ import annotations

from collections.abc import Mapping

from pagemesh.cli.planning.fields import Config

TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where multimodal models keep the decoder's configuration."""
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
KV_HEADS = (
    "num_key_value_heads_per_layer", "num_key_value_heads", "num_kv_heads", "n_kv_heads",
    "n_head_kv", "multi_query_group_num", "num_attention_groups",
)  # fmt: skip
HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim")
HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
CONTEXT = (
    "max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "n_ctx",
    "model_max_length", "max_sequence_length", "max_context_length", "context_length",
)  # fmt: skip
SIZES = (LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN)
"""Of these, what a family assumes does not count where its file has the number by another name."""

MULTI_QUERY_FAMILIES = frozenset({"falcon", "RefinedWebModel", "gpt_bigcode"})
MULTI_QUERY_KINDS = frozenset({"multiquery_attention", "multiquery", "mqa"})
"""What ``attn_config.attn_type`` (MPT) or ``attention_head_type`` (SantaCoder) say of one head."""

WINDOW_LAYERS = frozenset({"sliding_attention", "chunked_attention"})
FULL_LAYERS = frozenset({"full_attention", "attention"})

_LLAMA_SIZES: Config = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4_096,
}  # fmt: skip
ASSUMED: Mapping[str, Config] = {
    "RefinedWeb": {"max_position_embeddings": 2_048},  # Falcon's original name
    "RefinedWebModel": {"max_position_embeddings": 2_048},
    "bloom": {"seq_length": 2_048},  # the length of training; ALiBi itself has no limit
    "cohere2": {
        "max_position_embeddings": 8_192, "sliding_window": 4_096, "sliding_window_pattern": 4,
    },
    "falcon": {"max_position_embeddings": 2_048},
    "gemma": {"head_dim": 256, "num_key_value_heads": 16, "max_position_embeddings": 8_192},
    "gemma2": {
        "head_dim": 256, "num_key_value_heads": 4, "max_position_embeddings": 8_192,
        "sliding_window": 4_096, "sliding_window_pattern": 2,
    },
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 131_072, "sliding_window": 4_096, "sliding_window_pattern": 6,
    },
    "gpt2": {"n_positions": 1_024},
    "gpt_bigcode": {"n_positions": 1_024},
    "gpt_neo": {
        "max_position_embeddings": 2_048, "window_size": 256,
        "attention_types": [[["global", "local"], 12]],
    },
    "llama": {**_LLAMA_SIZES, "max_position_embeddings": 2_048},
    "llama4_text": {"attention_chunk_size": 8_192, "no_rope_layer_interval": 4},
    "mistral": {
        **_LLAMA_SIZES, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
        "sliding_window": 4_096,
    },
    "mixtral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072},
    "mllama_text_model": {"cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]},
    "phi3": {"max_position_embeddings": 4_096},
    "qwen2": {**_LLAMA_SIZES, "num_key_value_heads": 32, "max_position_embeddings": 32_768},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32_768},
    "qwen3_moe": {"num_key_value_heads": 4, "max_position_embeddings": 32_768},
}  # fmt: skip
"""Defaults in a family's code, which its config.json may omit."""

ENCODER_ENDINGS = ("ForMaskedLM", "ForImageClassification")
ENCODER_FIELDS = ("type_vocab_size", "relative_attention_num_buckets")
"""Fields that BERT and MPNet have, with whatever head they were saved, and no decoder has."""
ENCODER_FAMILIES = frozenset(
    {
        "align", "altclip", "beit", "chinese_clip", "clap", "clip", "clip_text_model",
        "clip_vision_model", "clipseg", "convbert", "convnext", "convnextv2", "deberta",
        "deberta-v2", "deit", "dinov2", "dinov2_with_registers", "dinov3_vit", "distilbert", "esm",
        "eurobert", "flaubert", "fnet", "funnel", "gte", "hubert", "ibert", "longformer",
        "metaclip_2", "mobilebert", "modernbert", "mpnet", "nomic_bert", "siglip", "siglip2",
        "siglip_text_model", "siglip_vision_model", "squeezebert", "swin", "swinv2", "vit",
        "vit_mae", "vit_msn", "wav2vec2", "wavlm", "xlnet",
    }
)  # fmt: skip
"""Those that the fields do not tell, or that images and sound go into."""

NOT_ALL_LAYERS_ATTEND = (
    "attn_layer_period", "layers_block_type", "hybrid_override_pattern", "attn_type_list",
    "full_attention_interval", "linear_attn_config", "mamba_d_state", "block_types",
    "state_size", "ssm_state_size", "full_attn_idxs", "attn_layer_indices", "layer_group_size",
    "attention_hidden_size", "rescale_every", "decay_low_rank_dim", "expand_k", "attn_mode",
)  # fmt: skip
"""Fields of models with recurrent layers or other attention than softmax. ``layer_types``, where a
model has it, says more than these."""
EVERY_LAYER_ATTENDS: Mapping[str, tuple[object, ...]] = {
    "attn_layer_period": (1,),
    "full_attention_interval": (1,),
    "layer_group_size": (1,),
    "attn_type_list": (1,),
    "layers_block_type": tuple(FULL_LAYERS),
    "block_types": tuple(FULL_LAYERS),
    "attn_mode": ("eager", "flash", "flash_attn", "flash_attention_2", "sdpa", "torch"),
}
"""Values, or entries of a list, that say that a layer has attention after all."""
OTHER_FORMS: Mapping[str, str] = {
    "kv_lora_rank": "keeps one latent a token instead of K and V of each head (MLA)",
    "num_kv_shared_layers": "has layers that share K and V with others",
    "use_cla": "has layers that share K and V with others",
    "global_head_dim": "has heads of several widths",
    "block_configs": "has layers that differ in their heads",
    "per_layer_config": "has layers that differ in their heads",
    "hybrid_layer_pattern": "has heads of their own in layers with a window",
    "cross_attention_layers": "has layers that keep K and V of images, not of tokens",
    "compress_ratios": "keeps K and V of groups of tokens as one",
    "compress_rates": "keeps K and V of groups of tokens as one",
    "compress_rate_csa": "keeps K and V of groups of tokens as one",
    "compress_rate_hca": "keeps K and V of groups of tokens as one",
    "total_ut_steps": "runs its layers several times a token, each time with K and V of its own",
}
ORDINARY_FORMS: Mapping[str, object] = {"total_ut_steps": 1}
"""Values of ``OTHER_FORMS`` that are none."""
