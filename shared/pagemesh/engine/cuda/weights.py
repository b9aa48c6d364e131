"""A checkpoint's tensors on a device, in the type the model runs in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagemesh.engine.checkpoint import Checkpoint, Progress, silent
from pagemesh.engine.model import DecoderConfig
from pagemesh.engine.weights import recipes

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Dense:
    """A matrix ``weight`` [n, k] and its ``bias`` [n], if it has one."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, n] of ``x`` [rows, k]."""
        return torch.nn.functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """``norms``: the weights of query and key heads, where the model normalises them."""

    attention_norm: Tensor
    qkv: Dense
    norms: tuple[Tensor, Tensor] | None
    output: Dense
    mlp_norm: Tensor
    gate_up: Dense
    down: Dense


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """``embedding``: [vocab, hidden]; ``head`` gives the logits. A tied head is the same
    memory as the embedding."""

    embedding: Tensor
    layers: tuple[DeviceLayer, ...]
    norm: Tensor
    head: Dense


def load_device_weights(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress = silent,
) -> DeviceWeights:
    """Load every tensor of ``config``'s decoder from ``checkpoint`` (an open one), one by one, so
    that no more than one is in host memory twice.

    Raises ``ConfigError`` when a tensor is missing or broken.
    """
    tensors: dict[str, Tensor] = {}
    wanted = list(recipes(config))
    for done, recipe in enumerate(wanted):
        is_tied = config.tied_embeddings and config.embedding_factor == config.logits_factor
        if recipe.name == "head.weight" and is_tied:
            tensors[recipe.name] = tensors["embedding"]
            continue
        parts = [checkpoint.tensor(name, shape) for name, shape in recipe.parts]
        whole = recipe.join(parts)
        # A copy even where nothing changes: what is mapped from the file is read-only.
        tensors[recipe.name] = whole.to(device=device, dtype=dtype, copy=True)
        progress("load", done + 1, len(wanted))
    return _assembled(config, tensors)


def _assembled(config: DecoderConfig, tensors: dict[str, Tensor]) -> DeviceWeights:
    def dense(name: str) -> Dense:
        return Dense(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def layer(index: int) -> DeviceLayer:
        own = f"layers.{index}."
        norms = None
        if config.head_norm:
            norms = (tensors[own + "query_norm"], tensors[own + "key_norm"])
        return DeviceLayer(
            attention_norm=tensors[own + "attention_norm"],
            qkv=dense(own + "qkv"),
            norms=norms,
            output=dense(own + "output"),
            mlp_norm=tensors[own + "mlp_norm"],
            gate_up=dense(own + "gate_up"),
            down=dense(own + "down"),
        )

    return DeviceWeights(
        embedding=tensors["embedding"],
        layers=tuple(layer(index) for index in range(config.layer_count)),
        norm=tensors["norm"],
        head=dense("head"),
    )
