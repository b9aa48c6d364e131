"""Decoders with random weights in the shapes of common small models: speed needs no training.

S  15M parameters, Llama-shaped     M  135M, Llama-shaped     L  0.5B, Qwen2-shaped
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagemesh.engine.model import DecoderConfig, Rope
from pagemesh.engine.weights import DecoderWeights, assemble, recipes
from pagemesh.kernels.ops import pack_linear
from pagemesh.kernels.weight_types import WeightType

_SCALE = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """The widths, in elements, that differ between the models."""

    vocab_tokens: int
    layer_count: int
    hidden_size: int
    head_count: int
    kv_head_count: int
    mlp_size: int
    rope_base: float
    qkv_bias: bool = False


HEAD_DIM = 64
CONTEXT_TOKENS_MAX = 8192
SHAPES = {
    "S": Shape(16_384, 8, 320, 5, 5, 864, 1e4),
    "M": Shape(49_152, 30, 576, 9, 3, 1536, 1e5),
    "L": Shape(151_936, 24, 896, 14, 2, 4864, 1e6, qkv_bias=True),
}


def random_config(name: str) -> DecoderConfig:
    """The configuration of model ``name``, one of ``SHAPES``."""
    shape = SHAPES[name]
    steps = torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM
    return DecoderConfig(
        architecture="Qwen2ForCausalLM" if shape.qkv_bias else "LlamaForCausalLM",
        layer_count=shape.layer_count,
        hidden_size=shape.hidden_size,
        head_count=shape.head_count,
        kv_head_count=shape.kv_head_count,
        head_dim=HEAD_DIM,
        mlp_size=shape.mlp_size,
        vocab_tokens=shape.vocab_tokens,
        context_tokens_max=CONTEXT_TOKENS_MAX,
        norm_epsilon=1e-5,
        rope=Rope(tuple((1.0 / shape.rope_base**steps).tolist()), 1.0),
        tied_embeddings=True,
        qkv_bias=shape.qkv_bias,
        output_bias=False,
        mlp_bias=False,
        head_norm=False,
    )


def random_weights(
    config: DecoderConfig, weight_type: WeightType = "float32", *, rounds_rows: bool = False
) -> DecoderWeights:
    """Weights of ``config``, packed as ``weight_type``; norms are one."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for recipe in recipes(config):
        tensor = torch.empty(recipe.shape)
        if "norm" in recipe.name:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, _SCALE, generator=generator)
        if recipe.matrix:
            tensor = pack_linear(tensor, weight_type=weight_type).panels
        tensors[recipe.name] = tensor
    return assemble(config, tensors, "bfloat16" if rounds_rows else "float32")
