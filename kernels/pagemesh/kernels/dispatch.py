"""Which backend runs an operation, and on how many threads.

``PAGEMESH_KERNELS`` = ``native`` (default) | ``reference`` (plain torch: slow, readable). A
missing native library is an error at start-up, never a silent change of backend: results would
differ in their last bits between workers.

This is about the CPU. On a GPU there is only one backend, Triton: the engine there
(``engine.cuda``) calls each operation's ``triton`` module itself.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import os
import sys

import torch

from pagemesh.kernels.native import library
from pagemesh.wire.errors import ConfigError

BACKEND_VARIABLE = "PAGEMESH_KERNELS"
BINDING_VARIABLES = ("GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")


class Backend(enum.Enum):
    """What computes on a CPU."""

    NATIVE = "native"
    REFERENCE = "reference"


@functools.cache
def backend() -> Backend:
    """The backend of this process. Raises ``ConfigError`` for an unknown name or a missing
    native library."""
    name = os.environ.get(BACKEND_VARIABLE, "").strip().lower() or Backend.NATIVE.value
    if name not in {known.value for known in Backend}:
        raise ConfigError(f"{BACKEND_VARIABLE}={name} is neither native nor reference")
    chosen = Backend(name)
    if chosen is Backend.NATIVE:
        library.library()
    return chosen


def is_native() -> bool:
    return backend() is Backend.NATIVE


@functools.cache
def native() -> ctypes.CDLL:
    """The native library, with torch's threads lent to it."""
    loaded = library.library()
    library.lend_threads()
    return loaded


def threads() -> int:
    """Threads a kernel may use: torch's own bound, so that both share one pool."""
    return torch.get_num_threads()


def use_threads(count: int) -> None:
    """Use ``count`` threads for what this thread computes from now on. If this process has just as
    many cores, each thread is bound to one of its own, unless the user has told the OpenMP runtime
    how to bind them."""
    torch.set_num_threads(count)
    if is_native() and not any(map(os.environ.get, BINDING_VARIABLES)):
        cores = sorted(os.sched_getaffinity(os.getpid())) if sys.platform == "linux" else []
        library.bind_threads(cores if len(cores) == count else [])


def identity() -> str:
    """Names what decides the last bit of a result: equal between workers whose tokens must be
    equal in deterministic mode."""
    if backend() is Backend.REFERENCE:
        return "reference"
    return f"native-{library.ABI_VERSION}-{library.cpu_level().name.lower()}"


def rows_float32(tensor: torch.Tensor, name: str, width: int) -> torch.Tensor:
    """``tensor`` when it is float32 ``[rows, width]`` on the CPU with contiguous rows.

    Raises ``ValueError`` that says what was expected and what was got.
    """
    shape = tensor.shape
    if (
        tensor.dtype is torch.float32
        and len(shape) == 2
        and shape[1] == width
        and (tensor.is_contiguous() or width == 1 or tensor.stride(1) == 1)
        and tensor.is_cpu
    ):
        return tensor
    raise ValueError(
        f"{name}: expected float32 [rows, {width}] on cpu with contiguous rows, got "
        f"{tensor.dtype} {list(shape)} stride {list(tensor.stride())} on {tensor.device}"
    )


def check_heads(
    name: str,
    rows: torch.Tensor,
    *,
    rows_count: int,
    head_dim: int,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
) -> None:
    """Raises ``ValueError`` unless ``rows`` is ``[rows_count, heads, head_dim]`` of one of
    ``dtypes``, with contiguous heads, at any row stride."""
    shape, stride = rows.shape, rows.stride()
    fits = len(shape) == 3 and shape[0] == rows_count and shape[2] == head_dim
    if not fits or rows.dtype not in dtypes:
        known = "float32" if dtypes == (torch.float32,) else "float"
        raise ValueError(
            f"{name}: expected {known} [{rows_count}, heads, {head_dim}], got {rows.dtype} "
            f"{list(shape)}"
        )
    if stride[2] != 1 or (shape[1] > 1 and stride[1] != head_dim):
        raise ValueError(f"{name}: expected contiguous heads, got stride {list(stride)}")


def rows_out(
    out: torch.Tensor | None, rows: int, width: int, *, like: torch.Tensor
) -> torch.Tensor:
    """Where float32 ``[rows, width]`` results go: ``out`` if it is given, else new memory.
    ``like``: a float32 tensor on the CPU. Raises ``ValueError`` when ``out`` does not fit."""
    if out is None:
        return like.new_empty((rows, width))
    rows_float32(out, "out", width)
    if out.shape[0] != rows:
        raise ValueError(f"out: expected {rows} rows, got {out.shape[0]}")
    return out
