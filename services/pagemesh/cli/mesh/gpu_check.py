"""Whether a mesh on a GPU could start here, asked before anything is started."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

from pagemesh.engine.cuda.driver import LIBRARY
from pagemesh.runtime.service_config import ServiceConfig
from pagemesh.runtime.sizes import shown_binary
from pagemesh.wire.errors import ConfigError

_SETTING = "PAGEMESH_DEVICE=cuda (--device)"
_PROBE_S_MAX = 120.0
"""The first use of a driver may take half a minute."""


def check_gpu(config: ServiceConfig) -> str:
    """What GPU was found, for people. Raises ``ConfigError`` where there is none, or too little
    of its memory is left for the pool alone. Takes seconds."""
    _check_installed()
    try:
        asked = subprocess.run(
            [sys.executable, "-m", "pagemesh.engine.cuda.probe"],
            capture_output=True, text=True, timeout=_PROBE_S_MAX, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{_SETTING}: the driver does not answer within {_PROBE_S_MAX:.0f} seconds; see "
            "whether nvidia-smi does, or use --device cpu"
        ) from None
    try:
        found = json.loads(asked.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = (asked.stderr.splitlines() or ["nothing"])[-1]
        raise ConfigError(f"{_SETTING}: asking for the GPU failed: {last[:300]}") from None
    if "error" in found:
        raise ConfigError(found["error"])
    wanted, free = config.pager.pool_bytes, int(found["free_bytes"])
    shown = f"{shown_binary(free)} of {shown_binary(int(found['total_bytes']))} free"
    if free < wanted:
        raise ConfigError(
            f"PAGEMESH_POOL_BYTES={wanted} (--pool-bytes): {found['name']} has {shown}; the pool "
            "has to fit beside the weights of every worker; lower it"
        )
    return f"{found['name']}, {shown}, torch {found['torch']}"


def _check_installed() -> None:
    """What can be told without starting anything, and in no time."""
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(f"{_SETTING}: triton is not installed; pip install 'pagemesh[cuda]'")
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
        ctypes.CDLL(LIBRARY)  # not initialised: that is for processes without children
    except OSError:
        raise ConfigError(
            f"{_SETTING}: no NVIDIA driver here ({LIBRARY} is missing); use --device cpu"
        ) from None
