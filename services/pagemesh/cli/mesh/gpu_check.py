"""Checks, before anything is started, whether a mesh on a GPU could run here."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from pagemesh.cli.planning.fields import Config
from pagemesh.cli.planning.shape import ModelShape, decoder_part
from pagemesh.cli.planning.weights import DTYPE_BYTES, Weights
from pagemesh.engine.cuda.driver import LIBRARY
from pagemesh.engine.cuda.graph_bytes import (
    CONTEXT_BYTES,
    context_bytes_max,
    draw_bytes_max,
    graph_bytes_max,
    logits_bytes_beyond,
)
from pagemesh.runtime.model_types import compute_type
from pagemesh.runtime.service_config import ServiceConfig
from pagemesh.runtime.sizes import shown_binary
from pagemesh.wire.errors import ConfigError

_SETTING = "PAGEMESH_DEVICE=cuda (--device)"
_PROBE_S_MAX = 120.0
"""The first use of a driver may take half a minute."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU that was found."""

    name: str
    free_bytes: int
    total_bytes: int
    torch: str

    @property
    def shown_memory(self) -> str:
        return f"{shown_binary(self.free_bytes)} of {shown_binary(self.total_bytes)} free"

    def __str__(self) -> str:
        return f"{self.name}, {self.shown_memory}, torch {self.torch}"


def check_gpu(config: ServiceConfig) -> Gpu:
    """The GPU of this machine. Raises ``ConfigError`` when there is none, or when its free memory
    is less than the pool alone. Takes seconds."""
    _check_installed()
    try:
        asked = subprocess.run(
            [sys.executable, "-m", "pagemesh.engine.cuda.probe"],
            capture_output=True, text=True, timeout=_PROBE_S_MAX, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{_SETTING}: the driver does not answer within {_PROBE_S_MAX:.0f} seconds; check "
            "whether nvidia-smi works, or use --device cpu"
        ) from None
    try:
        found = json.loads(asked.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = (asked.stderr.splitlines() or ["nothing"])[-1]
        raise ConfigError(f"{_SETTING}: asking for the GPU failed: {last[:300]}") from None
    if "error" in found:
        raise ConfigError(found["error"])
    gpu = Gpu(
        found["name"], int(found["free_bytes"]), int(found["total_bytes"]), str(found["torch"])
    )
    wanted = config.pager.pool_bytes
    if gpu.free_bytes < wanted:
        raise ConfigError(
            f"PAGEMESH_POOL_BYTES={wanted} (--pool-bytes): {gpu.name} has {gpu.shown_memory}; the "
            "pool must fit beside the weights of every worker; lower it"
        )
    return gpu


def check_gpu_room(
    gpu: Gpu,
    config: ServiceConfig,
    model: Config,
    shape: ModelShape,
    weights: Weights | None,
    worker_count: int,
) -> None:
    """Raises ``ConfigError`` unless the pool fits beside the weights of ``worker_count`` workers
    and the memory for their steps. ``model`` is its config.json; ``weights`` are those of each
    worker, None if their size is unknown."""
    own = decoder_part(model)
    try:
        vocab, hidden = int(own["vocab_size"]), int(own["hidden_size"])
    except (KeyError, TypeError, ValueError):
        return  # leave it to the workers, which know the model
    rows = config.worker.sequence_count_max
    item_bytes = DTYPE_BYTES[compute_type(config.worker, shape.stored)]
    steps = graph_bytes_max(
        sequence_count_max=rows, vocab_tokens=vocab, hidden_size=hidden, item_bytes=item_bytes
    )
    steps += logits_bytes_beyond(sequence_count_max=rows, vocab_tokens=vocab, item_bytes=item_bytes)
    steps += context_bytes_max(
        sequence_count_max=rows, context_tokens_max=shape.context_tokens_max,
        page_size=config.worker.page_size, head_dim=shape.head_dim,
    )  # fmt: skip
    steps += draw_bytes_max(sequence_count_max=rows, vocab_tokens=vocab)
    # One context is in free_bytes already: the probe's process had one.
    contexts = (worker_count - 1) * CONTEXT_BYTES
    pool, weights_bytes = config.pager.pool_bytes, weights.count_bytes if weights else 0
    if gpu.free_bytes >= pool + contexts + worker_count * (weights_bytes + steps):
        return
    each = f"in each of {worker_count} workers" if worker_count > 1 else "in its worker"
    raise ConfigError(
        f"PAGEMESH_POOL_BYTES={pool} (--pool-bytes): {gpu.name} has {gpu.shown_memory}; beside the "
        f"pool it must hold {shown_binary(weights_bytes)} of weights and up to "
        f"{shown_binary(steps)} for steps {each}; lower it, or use fewer workers"
    )


def _check_installed() -> None:
    """Checks that take no time and start no process. Raises ``ConfigError``."""
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(f"{_SETTING}: triton is not installed; run pip install triton")
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "of an unknown version"
    if torch.endswith("+cpu"):
        raise ConfigError(
            f"{_SETTING}: torch {torch} is a build without CUDA; install the CUDA build of that "
            "version, or use --device cpu"
        )
    try:
        ctypes.CDLL(LIBRARY)  # loaded only: a process that initialises CUDA must not fork
    except OSError:
        raise ConfigError(
            f"{_SETTING}: no NVIDIA driver here ({LIBRARY} is missing); use --device cpu"
        ) from None
