"""The items that ``ops.bench.gpu`` runs: each checks its results, then times itself."""

from __future__ import annotations

import numpy as np
import torch
from ops.bench.gpu_attention import attention_items
from ops.bench.gpu_pages import page_items
from ops.bench.gpu_rig import PAGE_SIZE, Item, Limits, Result, Rig, Tensor, difference, fill
from ops.bench.gpu_rows import row_items

from pagemesh.engine.cuda.decoder import CudaDecoder
from pagemesh.engine.cuda.weights import Dense, DeviceLayer, DeviceWeights
from pagemesh.engine.model import DecoderConfig, Rope
from pagemesh.kernels.ops import ragged_batch

_KV_HEADS, _HEAD_DIM = 8, 128


def items(rig: Rig) -> dict[str, Item]:
    """Every item by name: each GPU kernel, then whole decode steps."""
    steps = {
        f"decode step batch {batch}, graphs against none": _step(rig, answers=batch)
        for batch in (1, 16, 64)
    }
    for answers, prompt in ((0, 16), (0, 256), (16, 64), (16, 256), (64, 256)):
        name = f"step of {answers} answers and a prompt of {prompt}, graphs against none"
        steps[name] = _step(rig, answers=answers, prompt=prompt)
    return attention_items(rig) | page_items(rig) | row_items(rig) | steps


def _step(rig: Rig, *, answers: int, prompt: int = 0) -> Item:
    """A random model of 1.5 billion parameters: the time of a step against that of reading its
    weights, K and V; ``torch_ms`` is the same step without a graph. A trial has no graphs."""

    def run(best: Limits) -> Result:
        config, weights = _random_model(rig)
        counts = [1] * min(answers, rig.size(answers, 2))
        if prompt:
            counts.append(rig.size(prompt, 5))
        pages, sequences = rig.size(64, 2), len(counts)
        pool = rig.pool(
            "bfloat16", pages * sequences, kv_heads=config.kv_head_count,
            head_dim=config.head_dim, layers=config.layer_count,
        )  # fmt: skip
        for layer in range(config.layer_count):
            fill(rig, pool, layer)
        order = np.random.default_rng(0).permutation(pool.page_count).astype(np.uint32)
        tables = [order[pages * i : pages * (i + 1)] for i in range(sequences)]
        past = pages * PAGE_SIZE // 2
        rows = ragged_batch(tables, [past] * sequences, counts, PAGE_SIZE)
        tokens = torch.arange(rows.rows) % config.vocab_tokens
        wanted = torch.from_numpy(np.cumsum(counts) - 1)
        with_graphs = CudaDecoder(config, weights, with_graphs=not rig.is_trial)
        without = CudaDecoder(config, weights, with_graphs=False)

        def step(decoder: CudaDecoder) -> Tensor:
            logits = decoder.step(tokens, rows, wanted, pool, logits=True)[1]
            assert logits is not None
            return logits

        error = difference(step(with_graphs), step(without))
        if not rig.is_trial and not with_graphs.graph_count:
            raise RuntimeError("no graph was captured: plain steps were compared with plain ones")
        ms = rig.timed_ms(lambda: step(with_graphs), captured=False)
        plain_ms = rig.timed_ms(lambda: step(without), captured=False)
        linear = [(d.qkv, d.output, d.gate_up, d.down) for d in weights.layers]
        read_bytes = sum(one.weight.nbytes for layer in linear for one in layer)
        read_bytes += weights.head.weight.nbytes
        read_bytes += (past * sequences + rows.rows) * pool.layout.token_bytes
        fraction = read_bytes / ms * 1e3 / best.bandwidth_bytes
        return Result(error, 0.02, ms, fraction, beside_ms=plain_ms)

    return run


def _random_model(rig: Rig) -> tuple[DecoderConfig, DeviceWeights]:
    hidden, mlp, vocab = rig.size(2048, 64), rig.size(8192, 128), rig.size(32_000, 100)
    heads, kv_heads, head_dim = rig.size(16, 4), rig.size(_KV_HEADS, 2), rig.size(_HEAD_DIM, 32)
    layers = rig.size(24, 2)
    frequencies = (1.0 / 10_000.0 ** (torch.arange(0, head_dim, 2) / head_dim)).tolist()
    config = DecoderConfig(
        architecture="LlamaForCausalLM", layer_count=layers, hidden_size=hidden,
        head_count=heads, kv_head_count=kv_heads, head_dim=head_dim, mlp_size=mlp,
        vocab_tokens=vocab, context_tokens_max=8192, norm_epsilon=1e-6,
        rope=Rope(tuple(frequencies), 1.0), tied_embeddings=False, qkv_bias=False,
        output_bias=False, mlp_bias=False, head_norm=False,
    )  # fmt: skip

    def dense(outputs: int, inputs: int) -> Dense:
        return Dense(rig.rows(outputs, inputs) * inputs**-0.5, None)

    ones = torch.ones(hidden, dtype=rig.half(), device=rig.device)
    width = config.query_size + 2 * config.kv_size
    return config, DeviceWeights(
        embedding=rig.rows(vocab, hidden),
        layers=tuple(
            DeviceLayer(
                ones, dense(width, hidden), None, dense(hidden, config.query_size), ones,
                dense(2 * mlp, hidden), dense(hidden, mlp),
            )
            for _ in range(layers)
        ),
        norm=ones,
        head=dense(vocab, hidden),
    )  # fmt: skip
