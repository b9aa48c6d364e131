"""The forward pass of the Llama family on a device: ``engine.forward`` with fused kernels.

    x [T, hidden] = embedding[tokens]
    for each layer:
        qkv = norm(x) @ qkv.T (+ bias)     q rotated in place, k and v rotated into their pages
        x += attention(q, pages) @ output.T    and its norm, in one pass
        x += silu(gate) * up @ down.T          and the next layer's norm, in one pass
    logits [n, vocab] = norm(x)[wanted] @ head.T

Activations and weights have one type (bfloat16, usually); sums and softmax are float32. Matrix
products are torch's, whose sums depend on the number of rows: a row's bits are not the same in
every batch, so there is no deterministic mode here.
"""

from __future__ import annotations

import torch

from pagemesh.engine.cuda.rows import DeviceRows
from pagemesh.engine.cuda.weights import DeviceLayer, DeviceWeights
from pagemesh.engine.forward import rotation_tables
from pagemesh.engine.model import DecoderConfig
from pagemesh.kernels.ops import KvPool

Tensor = torch.Tensor


class DeviceForward:
    """Weights and the order in which to use them. Holds no sequence and no page."""

    def __init__(self, config: DecoderConfig, weights: DeviceWeights) -> None:
        # Imported only once there is a device to run on, since these modules import Triton.
        from pagemesh.kernels.add_rms_norm.triton import add_rms_norm
        from pagemesh.kernels.merge_states.triton import merge_states
        from pagemesh.kernels.paged_attention.triton import paged_attention
        from pagemesh.kernels.paged_prefill.triton import paged_prefill
        from pagemesh.kernels.rms_norm.triton import rms_norm
        from pagemesh.kernels.rope_kv_write.triton import rope_kv_write
        from pagemesh.kernels.silu_mul.triton import silu_mul

        self._merge_states = merge_states
        self._add_rms_norm, self._rms_norm = add_rms_norm, rms_norm
        self._paged_attention, self._paged_prefill = paged_attention, paged_prefill
        self._rope_kv_write, self._silu_mul = rope_kv_write, silu_mul
        self.config = config
        self.weights = weights
        self.device = weights.embedding.device
        cosine, sine = rotation_tables(config.rope, config.context_tokens_max)
        self._cosine, self._sine = cosine.to(self.device), sine.to(self.device)

    def hidden(self, rows: DeviceRows, pool: KvPool) -> Tensor:
        """[n, hidden], ready for ``logits``, of the rows wanted. Writes K and V of all rows.
        Nothing here waits for the device."""
        config, layers = self.config, self.weights.layers
        position = rows.batch.row_position.clamp(min=0)  # padding has none
        angles = (self._cosine[position], self._sine[position])
        x = self.weights.embedding[rows.tokens]
        normed = self._rms_norm(x, layers[0].attention_norm, config.norm_epsilon)
        # Every layer writes its attention here. No layer writes padding among prompts: zeros there
        # stay finite, which uninitialised memory might not.
        mixed = x.new_zeros((x.shape[0], config.head_count, config.head_dim))
        for index, layer in enumerate(layers):
            self._attend(index, layer, normed, angles, rows, pool, mixed)
            normed = self._joined(x, layer.output(mixed.flatten(1)), layer.mlp_norm)
            gated = self._silu_mul(layer.gate_up(normed))
            last = index + 1 == len(layers)
            next_norm = self.weights.norm if last else layers[index + 1].attention_norm
            normed = self._joined(x, layer.down(gated), next_norm)
        return normed[rows.wanted]

    def warm_up_merges(self) -> None:
        """Compile the kernel that merges parts of a prompt's context, for few parts and many."""
        heads, width = self.config.head_count, self.config.head_dim
        mixed = self.weights.embedding.new_zeros((1, heads, width))
        position = torch.zeros(1, dtype=torch.int32, device=self.device)
        for parts in (2, 32):
            states = torch.zeros((1, heads, parts, width), device=self.device)
            self._merge_states(states, states[..., 0].contiguous(), mixed, position)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab] of ``hidden`` rows."""
        return self.weights.head(hidden).float()

    def _joined(self, x: Tensor, addend: Tensor, norm: Tensor) -> Tensor:
        return self._add_rms_norm(x, addend, norm, self.config.norm_epsilon)

    def _attend(
        self,
        index: int,
        layer: DeviceLayer,
        normed: Tensor,
        angles: tuple[Tensor, Tensor],
        rows: DeviceRows,
        pool: KvPool,
        mixed: Tensor,
    ) -> None:
        """Write K and V, and let q attend to the pages, into ``mixed`` [T, heads, head_dim]."""
        config, count = self.config, normed.shape[0]
        joined = layer.qkv(normed).view(count, -1, config.head_dim)
        self._rope_kv_write(
            joined, angles, pool, index, rows.batch.slots, layer.norms, config.norm_epsilon
        )
        q, scale = joined[:, : config.head_count], config.attention_scale
        for own in rows.alone:
            self._paged_attention(
                q[own.part], pool, index, own.batch, scale, mixed[own.part], spans=own.spans
            )
        if len(rows.blocks):
            first = rows.alone[-1].part.stop if rows.alone else 0
            self._paged_prefill(
                q, pool, index, rows.batch, scale, mixed, blocks=rows.blocks, first_row=first
            )
