"""A model ready to run on a GPU, or a one-line reason why it cannot."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import time
from pathlib import Path
from typing import Literal

import torch

from pagemesh.engine.checkpoint import (
    Checkpoint,
    Progress,
    config_version,
    silent,
    weights_digest,
)
from pagemesh.engine.cuda import driver
from pagemesh.engine.cuda.decoder import CudaDecoder
from pagemesh.engine.cuda.device import CudaMaker, GpuDevice, SharedMaker
from pagemesh.engine.cuda.graph_bytes import ROWS_MAX
from pagemesh.engine.cuda.toolchain import check_toolchain
from pagemesh.engine.cuda.weights import DeviceWeights, load_device_weights
from pagemesh.engine.device_memory import MemoryMaker
from pagemesh.engine.loading import (
    ServedModel,
    page_layout,
    remembered_config,
    root_of,
    with_own_head,
)
from pagemesh.engine.model import DecoderConfig
from pagemesh.engine.opening import Engine, has_lean_path
from pagemesh.kernels.layout import KvDtype, PageLayout
from pagemesh.kernels.ops import KvPool
from pagemesh.runtime.logs import get_logger
from pagemesh.runtime.user_paths import ensure_folder
from pagemesh.wire.errors import ConfigError

DeviceName = Literal["cuda", "interpreter"]
ComputeType = Literal["float32", "bfloat16", "float16"]
TYPES: dict[ComputeType, torch.dtype] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip
_SETTING = "PAGEMESH_DEVICE=cuda (--device)"
_log = get_logger(__name__)


def open_on_device(
    folder: Path,
    *,
    name: str,
    page_size: int,
    cache: Path,
    device_name: DeviceName,
    compute_type: ComputeType,
    progress: Progress = silent,
    kv_dtype: KvDtype = "float32",
    sequence_count_max: int = ROWS_MAX,
) -> Engine:
    """The model in ``folder`` on the first GPU that this process may use, for steps of at most
    ``sequence_count_max`` sequences. Raises ``ConfigError``, one sentence, like ``open_model`` and
    for a machine without a usable GPU."""
    device, maker = find_device(device_name)
    where = f"model {folder}"
    if not has_lean_path(folder):
        raise ConfigError(
            f"{where} runs on the modules of transformers, which have no GPU path here; use "
            "--device cpu"
        )
    ensure_folder(cache, "PAGEMESH_CACHE_DIR")
    described = config_version(folder)
    config = remembered_config(folder, cache)
    layout = page_layout(config, page_size, kv_dtype)
    with Checkpoint(folder, described) as checkpoint:
        config = with_own_head(config, checkpoint)
        stored = weights_digest(checkpoint.paths, config.digest(), cache, progress)
        weights = _load(checkpoint, config, device, TYPES[compute_type], progress, where)
        checkpoint.require_unchanged()
    root = root_of(
        folder, layout, weights=_digest(stored, compute_type), positions=config.rope.canonical()
    )
    is_gpu = device.type == "cuda"
    decoder = CudaDecoder(
        config, weights, with_graphs=is_gpu, sequence_count_max=sequence_count_max
    )
    steps = GpuDevice(device, maker)
    if is_gpu:
        _compile(decoder, steps, layout)
    model = ServedModel(name, config, layout, root, place=maker.place)
    return Engine(model, decoder, steps, maker, decoder.prepare)


def find_device(name: DeviceName) -> tuple[torch.device, MemoryMaker]:
    """The first GPU that this process may use, and its memory. Raises ``ConfigError``."""
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            f"PAGEMESH_DEVICE={name} (--device): triton is not installed; pip install triton"
        )
    if name == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which is later
        return torch.device("cpu"), SharedMaker()
    if torch.version.cuda is None:
        raise ConfigError(
            f"{_SETTING}: torch {torch.__version__} is a build without CUDA; install the CUDA "
            "build of that version, or use --device cpu"
        )
    driver.library()
    if not torch.cuda.is_available():
        raise ConfigError(
            f"{_SETTING}: torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU; see "
            "that nvidia-smi lists one and CUDA_VISIBLE_DEVICES does not hide it"
        )
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise ConfigError("TRITON_INTERPRET is set, which keeps kernels off the GPU; unset it")
    device = torch.device("cuda", 0)
    return device, CudaMaker(device)


def _load(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    where: str,
) -> DeviceWeights:
    try:
        return load_device_weights(checkpoint, config, device, dtype, progress)
    except torch.cuda.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info(device)
        raise ConfigError(
            f"{where}: its weights do not fit on {torch.cuda.get_device_name(device)}, which has "
            f"{free >> 20} of {total >> 20} MiB left; each worker holds them once: use fewer "
            "workers, or --dtype bfloat16"
        ) from None


def _compile(decoder: CudaDecoder, steps: GpuDevice, layout: PageLayout) -> None:
    """Compile kernels before there is work. Raises ``ConfigError`` when something that this needs
    is missing."""
    began_s = time.monotonic()
    memory = torch.zeros(2 * layout.page_bytes, dtype=torch.uint8, device=steps.device)
    pool = KvPool(layout, memory)
    try:
        decoder.warm_up(pool)
        steps.copy_pages(pool, [(0, 1)])
        steps.finish()
    except Exception:
        check_toolchain()  # says in one line what Triton says in twenty
        raise
    _log.info("worker.kernels_compiled", seconds=round(time.monotonic() - began_s, 2))


def _digest(stored: bytes, compute_type: ComputeType) -> bytes:
    """The digest of weights that are computed with as ``compute_type``, on which K and V depend."""
    if compute_type == "float32":
        return stored
    return hashlib.sha256(stored + f"{compute_type} throughout, 1".encode()).digest()
