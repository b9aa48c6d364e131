"""The highest speed that a machine allows for a workload, by the floor of its steps. Pure except
for ``probe``.

The floor of a step is max(bytes / bandwidth, operations / arithmetic), as in ``bench_step``: it
reads the weights once, and K and V of the tokens attended to. The prompts of a turn are one step,
its answers one step per token for all users together. What users share is computed and read once,
and nothing computed in an earlier turn is computed again. A server that reads weights for prompts
and answers at the same time could be slightly faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ops.bench.serving.workloads import Workload

_FLOAT_BYTES = 4
_PROBE_BYTES = 256 << 20
_PROBE_ROUNDS = 200_000
_PROBE_TURNS = 5


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured limits: bytes a second of a pass over memory, and operations a second (two per
    multiply-add) in the nearest cache."""

    memory_bytes_s: float
    operations_s: float


@dataclass(frozen=True, slots=True)
class Shape:
    """Elements of a float32 decoder: in the matrices of all layers, in the head, and, summed over
    all layers, in a token's queries and in its K and V."""

    layers: int
    head: int
    query: int
    kv: int


def shape_of(folder: Path) -> Shape:
    """The shape of the model in ``folder``. Raises ``ConfigError`` if the model has no forward pass
    of ours."""
    from transformers import AutoConfig  # imports torch, which takes long and nothing else needs

    from pagemesh.engine.model import decoder_config

    config = decoder_config(AutoConfig.from_pretrained(folder), where=str(folder))
    joined = 2 * config.query_size + 2 * config.kv_size + 3 * config.mlp_size
    return Shape(
        layers=config.layer_count * config.hidden_size * joined,
        head=config.vocab_tokens * config.hidden_size,
        query=config.layer_count * config.query_size,
        kv=config.layer_count * 2 * config.kv_size,
    )


def floor_tokens_s(shape: Shape, workload: Workload, machine: Machine) -> float:
    """Output tokens a second of ``workload`` at the floor."""
    total_s, context = 0.0, 0  # tokens of a user from earlier turns
    shared = workload.shared_tokens
    for turn in range(workload.turns):
        known = workload.is_talk and turn > 0
        own = workload.added_tokens if known else workload.own_tokens
        start = context if known else shared
        common = 0 if known else shared
        total_s += _prompt_s(shape, workload.users, common, start, own, machine)
        end = start + own + workload.output_tokens
        middle = (start + own + end) // 2
        answer_s = _answer_s(shape, workload.users, shared, middle, machine)
        total_s += (workload.output_tokens - 1) * answer_s
        context = end
    return workload.users * workload.turns * workload.output_tokens / total_s


def _prompt_s(
    shape: Shape, users: int, common: int, start: int, own: int, machine: Machine
) -> float:
    """Seconds of the prompts: ``common`` tokens for all users, then ``own`` tokens of each from
    position ``start`` on."""
    rows = common + users * own
    seen = common * (common + 1) // 2 + users * (own * start + own * (own + 1) // 2)
    operations = 2 * (rows * shape.layers + users * shape.head + 2 * shape.query * seen)
    return _step_s(shape, 0, operations, machine)


def _answer_s(shape: Shape, users: int, shared: int, context: int, machine: Machine) -> float:
    """Seconds of a token for each user at ``context`` tokens, the first ``shared`` of which are
    common to all."""
    positions = shared + users * (context - shared)
    operations = 2 * users * (shape.layers + shape.head + 2 * shape.query * context)
    return _step_s(shape, positions * shape.kv, operations, machine)


def _step_s(shape: Shape, kv: int, operations: int, machine: Machine) -> float:
    read = _FLOAT_BYTES * (shape.layers + shape.head + kv)
    return max(read / machine.memory_bytes_s, operations / machine.operations_s)


def probe(threads: int) -> Machine:
    """Measure this machine in 0.3 s: the best of some turns, since other load only slows a turn
    down."""
    import torch

    from pagemesh.kernels.dispatch import native

    torch.set_num_threads(threads)
    data = torch.ones(_PROBE_BYTES // _FLOAT_BYTES)
    library = native()
    stream_s = min(
        _seconds(lambda: library.pm_probe_stream(data.data_ptr(), data.numel(), threads))
        for _ in range(_PROBE_TURNS)
    )
    arithmetic_s = min(
        _seconds(lambda: library.pm_probe_arithmetic(_PROBE_ROUNDS, threads))
        for _ in range(_PROBE_TURNS)
    )
    done: int = 2 * library.pm_probe_arithmetic(_PROBE_ROUNDS, threads)
    return Machine(_PROBE_BYTES / stream_s, done / arithmetic_s)


def _seconds(job: Callable[[], object]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start
