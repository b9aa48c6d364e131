"""A model ready to run, by whichever path runs it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pagemesh.engine.checkpoint import FilesChangedError, Progress, silent
from pagemesh.engine.coverage import inexact, path_in
from pagemesh.engine.device import HOST, StepDevice
from pagemesh.engine.device_memory import MemoryMaker
from pagemesh.engine.executor import StepDecoder
from pagemesh.engine.files import cache_folder
from pagemesh.engine.forward import Decoder
from pagemesh.engine.loading import ServedModel, load_model
from pagemesh.engine.model import LeanObstacleError
from pagemesh.kernels.layout import KvDtype
from pagemesh.kernels.ops import KvPool
from pagemesh.kernels.weight_types import AskedType
from pagemesh.runtime.logs import get_logger
from pagemesh.runtime.model_types import compute_type, page_type, type_for
from pagemesh.runtime.settings import WorkerConfig

_CHANGES_MAX = 10
_PAUSE_S = 1.0
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """All that runs a model's steps. ``maker``: makes the memory of its pools' pages, if those are
    not in the pool files. ``prepare``: slow work to be done once, with a pool before its first
    step."""

    model: ServedModel
    decoder: StepDecoder
    device: StepDevice = HOST
    maker: MemoryMaker | None = None
    prepare: Callable[[KvPool], None] | None = None


def open_engine(config: WorkerConfig, progress: Progress = silent) -> Engine:
    """The engine that ``config`` asks for; its model must be a folder. If the folder changes while
    it is read, it is read again. Raises ``ConfigError``, one sentence, for a model that is broken
    or cannot run on the device, and for a missing device."""
    for _ in range(_CHANGES_MAX):
        try:
            return _open_engine(config, progress)
        except FilesChangedError as error:
            _log.warning("worker.model_changed", why=str(error), next="the model is read again")
            time.sleep(_PAUSE_S)
    return _open_engine(config, progress)


def _open_engine(config: WorkerConfig, progress: Progress) -> Engine:
    folder, stored = Path(config.model), type_for(config)
    cache = cache_folder(config.cache_dir)
    if config.device == "cpu":
        model, decoder = open_model(
            folder, name=config.model_name, page_size=config.page_size, cache=cache,
            deterministic=config.deterministic, progress=progress,
            kv_dtype=page_type(config, stored), weight_type=config.weight_type,
        )  # fmt: skip
        return Engine(model, decoder)
    # Imported here because a worker on a CPU never needs it.
    from pagemesh.engine.cuda.opening import open_on_device

    return open_on_device(
        folder, name=config.model_name, page_size=config.page_size, cache=cache,
        device_name=config.device, compute_type=compute_type(config, stored), progress=progress,
        kv_dtype=page_type(config, stored), sequence_count_max=config.sequence_count_max,
    )  # fmt: skip


def open_model(
    folder: Path,
    *,
    name: str,
    page_size: int,
    cache: Path,
    deterministic: bool,
    progress: Progress = silent,
    kv_dtype: KvDtype = "float32",
    weight_type: AskedType = "float32",
) -> tuple[ServedModel, StepDecoder]:
    """The model in ``folder`` on the CPU. Raises ``ConfigError``, one sentence, for a broken folder
    or a model that cannot run with these settings."""
    if has_lean_path(folder):
        # transformers may interpret a configuration differently from how it is written.
        with suppress(LeanObstacleError):
            loaded = load_model(
                folder, name=name, page_size=page_size, cache=cache, progress=progress,
                kv_dtype=kv_dtype, weight_type=weight_type, deterministic=deterministic,
            )  # fmt: skip
            return loaded, Decoder(loaded.config, loaded.weights, deterministic=deterministic)
    if deterministic:
        raise inexact(folder)
    # Imports transformers, which lean models need only at their first start.
    from pagemesh.engine.fallback_loading import load_fallback

    return load_fallback(
        folder, name=name, page_size=page_size, cache=cache, progress=progress, kv_dtype=kv_dtype,
        weight_type=weight_type,
    )  # fmt: skip


def has_lean_path(folder: Path) -> bool:
    """Whether, by its config.json as written, the model in ``folder`` runs on our own forward pass
    rather than on the modules of ``transformers``. Raises ``ConfigError``, one sentence, when
    neither can run it."""
    return path_in(folder) == "lean"
