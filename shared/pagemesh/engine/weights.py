"""The tensors of a decoder as the forward pass wants them, and where they come from.

Projections with the same input are concatenated into one matrix (query, key and value; gate and
up), so that a step does four products per layer instead of seven.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from pagemesh.engine.model import DecoderConfig
from pagemesh.kernels.ops import LayerWeights, PackedLinear, packed_shape
from pagemesh.kernels.weight_types import AskedType, WeightType, rounds_rows

Tensor = torch.Tensor
HEAD = "lm_head.weight"
"""The name in a checkpoint of a head that is not tied to the embeddings."""
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """``embedding``: float32, bfloat16 or float16 [vocab, hidden]; ``head`` gives the logits."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: PackedLinear


@dataclass(frozen=True, slots=True)
class Recipe:
    """One tensor to prepare: ``parts`` of the checkpoint (name, shape), joined along their
    first dimension and multiplied by ``factor``. A ``matrix`` is packed for ``kernels.linear``; a
    ``table`` is only looked up row by row and may be of any float type."""

    name: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    matrix: bool = False
    table: bool = False
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0][1]
        return (sum(shape[0] for _, shape in self.parts), *first[1:])

    def prepared_shape(self, weight_type: WeightType) -> tuple[int, ...]:
        """The shape of the prepared tensor; a matrix is kept as ``weight_type``."""
        if not self.matrix:
            return self.shape
        return packed_shape(self.shape[0], self.shape[1], weight_type)

    def is_as_stored(self, parts: Sequence[Tensor]) -> bool:
        """Whether the checkpoint's tensor serves unchanged."""
        if len(parts) > 1 or self.factor != 1.0 or self.matrix:
            return False
        return self.table or parts[0].dtype == torch.float32

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The tensor made of ``parts``, which come in the recipe's order. A single part without a
        factor is returned as it is. Factors are multiplied in float32, whatever is stored."""
        whole = joined(parts)
        return whole if self.factor == 1.0 else whole.to(torch.float32) * self.factor


def joined(parts: Sequence[Tensor]) -> Tensor:
    """``parts``, concatenated along their first dimension; a single part as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def recipes(config: DecoderConfig) -> Iterator[Recipe]:
    """Every tensor of a decoder, in the order the forward pass reads them."""
    hidden, vocab = config.hidden_size, config.vocab_tokens
    embedding = ((EMBEDDING, (vocab, hidden)),)
    yield Recipe("embedding", embedding, table=True, factor=config.embedding_factor)
    for index in range(config.layer_count):
        yield from _layer_recipes(config, index)
    yield Recipe("norm", (("model.norm.weight", (hidden,)),))
    parts = ((EMBEDDING if config.tied_embeddings else HEAD, (vocab, hidden)),)
    yield Recipe("head.weight", parts, matrix=True, factor=config.logits_factor)


def _layer_recipes(config: DecoderConfig, index: int) -> Iterator[Recipe]:
    source, target = f"model.layers.{index}.", f"layers.{index}."
    hidden, query, kv, mlp = config.hidden_size, config.query_size, config.kv_size, config.mlp_size

    def linear(
        name: str,
        parts: tuple[tuple[str, int], ...],
        inputs: int,
        bias: bool,
        factor: float = 1.0,
    ) -> Iterator[Recipe]:
        weights = tuple((f"{source}{part}.weight", (outputs, inputs)) for part, outputs in parts)
        yield Recipe(f"{target}{name}.weight", weights, matrix=True, factor=factor)
        if bias:
            biases = tuple((f"{source}{part}.bias", (outputs,)) for part, outputs in parts)
            yield Recipe(f"{target}{name}.bias", biases, factor=factor)

    def norm(name: str, part: str, width: int) -> Recipe:
        return Recipe(target + name, ((f"{source}{part}.weight", (width,)),))

    yield norm("attention_norm", "input_layernorm", hidden)
    heads: tuple[tuple[str, int], ...]
    heads = (("self_attn.q_proj", query), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv))
    gates: tuple[tuple[str, int], ...]
    gates = (("mlp.gate_proj", mlp), ("mlp.up_proj", mlp))
    if config.fused_projections:
        heads, gates = (("self_attn.qkv_proj", query + 2 * kv),), (("mlp.gate_up_proj", 2 * mlp),)
    yield from linear("qkv", heads, hidden, config.qkv_bias)
    if config.head_norm:
        yield norm("query_norm", "self_attn.q_norm", config.head_dim)
        yield norm("key_norm", "self_attn.k_norm", config.head_dim)
    part = (("self_attn.o_proj", hidden),)
    yield from linear("output", part, query, config.output_bias, config.residual_factor)
    yield norm("mlp_norm", "post_attention_layernorm", hidden)
    yield from linear("gate_up", gates, hidden, config.mlp_bias)
    part = (("mlp.down_proj", hidden),)
    yield from linear("down", part, mlp, config.mlp_bias, config.residual_factor)


def assemble(
    config: DecoderConfig, tensors: Mapping[str, Tensor], weight_type: AskedType = "float32"
) -> DecoderWeights:
    """The decoder's weights from ``tensors``, named and shaped as ``recipes`` says, with matrices
    as ``weight_type`` asks for."""
    no_bias, rounds = torch.empty(0), rounds_rows(weight_type)
    hidden, mlp = config.hidden_size, config.mlp_size

    def linear(name: str, outputs: int, inputs: int) -> PackedLinear:
        bias = tensors.get(f"{name}.bias", no_bias)
        return PackedLinear(outputs, inputs, tensors[f"{name}.weight"], bias, rounds)

    def layer(index: int) -> LayerWeights:
        prefix = f"layers.{index}."
        return LayerWeights(
            attention_norm=tensors[prefix + "attention_norm"],
            qkv=linear(prefix + "qkv", config.query_size + 2 * config.kv_size, hidden),
            query_norm=tensors.get(prefix + "query_norm"),
            key_norm=tensors.get(prefix + "key_norm"),
            output=linear(prefix + "output", hidden, config.query_size),
            mlp_norm=tensors[prefix + "mlp_norm"],
            gate_up=linear(prefix + "gate_up", 2 * mlp, hidden),
            down=linear(prefix + "down", hidden, mlp),
        )

    return DecoderWeights(
        embedding=tensors["embedding"],
        layers=tuple(layer(index) for index in range(config.layer_count)),
        norm=tensors["norm"],
        head=linear("head", config.vocab_tokens, hidden),
    )
