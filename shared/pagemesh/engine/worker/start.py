"""What a worker needs before it can serve: its model, and turns with the workers beside it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from pagemesh.engine.cores import usable_cores
from pagemesh.engine.opening import Engine, open_engine
from pagemesh.engine.worker.progress import logged_progress
from pagemesh.engine.worker.stepper import bounded_threads
from pagemesh.engine.worker.turns import NoTurns, SharedTurns, Turns
from pagemesh.kernels.dispatch import is_native
from pagemesh.kernels.ops import identity
from pagemesh.runtime.logs import get_logger
from pagemesh.runtime.model_types import with_types
from pagemesh.runtime.settings import WorkerConfig

_log = get_logger(__name__)


def turns_of(config: WorkerConfig, lock_path: Path) -> Turns:
    """Turns with the other workers of the pool folder. None if at most half of the cores were asked
    for, since another worker with as many threads then has cores of its own; nor for deterministic
    answers without the native kernels, since the bits of torch's products depend on the threads.
    A GPU's worker needs one thread and no turns."""
    if config.device == "cuda":
        return NoTurns(config.thread_count or 1)
    cores, thread_count = os.sched_getaffinity(0), bounded_threads(config.thread_count)
    has_own = 0 < 2 * config.thread_count <= len(cores)
    if has_own or (config.deterministic and not is_native()):
        return NoTurns(thread_count)
    return SharedTurns(lock_path, cores, time.monotonic_ns, thread_count)


def load(config: WorkerConfig) -> Engine:
    """Blocks for as long as loading takes; progress goes to the log."""
    began = time.monotonic()
    # By default torch has a thread for each core, even if a quota allows less CPU time.
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores().thread_count))
    config = with_types(config)
    engine = open_engine(config, logged_progress())
    _log.info(
        "worker.model_loaded", model=config.model_name, layers=engine.model.config.layer_count,
        dtype=config.dtype, kv_dtype=config.kv_dtype,
        kernels=engine.device.place or identity(), seconds=round(time.monotonic() - began, 2),
    )  # fmt: skip
    return engine
