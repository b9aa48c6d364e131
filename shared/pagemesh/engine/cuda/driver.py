"""The few calls of the CUDA driver that torch does not offer, through ``libcuda.so.1``.

Nothing is loaded at import. Names, numbers and layouts are those of the driver's C interface
(``cuda.h``, CUDA 12).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

from pagemesh.wire.errors import ConfigError

LIBRARY = "libcuda.so.1"
ALLOCATION_PINNED = 1
LOCATION_DEVICE = 1
HANDLE_FILE_DESCRIPTOR = 1
GRANULARITY_RECOMMENDED = 1
ACCESS_READ_WRITE = 3
WHOLE_DEVICE = threading.Lock()
"""Held by a thread that captures a graph, and by one that synchronises the whole device or changes
what is mapped on it: either would break the capture."""
_OUT_OF_MEMORY = 2
"""``CUDA_ERROR_OUT_OF_MEMORY``."""


class OutOfMemory(RuntimeError):
    """The device has too little memory left."""


class Location(ctypes.Structure):
    """``CUmemLocation``."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class AllocationFlags(ctypes.Structure):
    """``CUmemAllocationProp.allocFlags``."""

    _fields_ = [
        ("compression_type", ctypes.c_ubyte),
        ("rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class AllocationProperties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("windows_attributes", ctypes.c_void_p),
        ("flags", AllocationFlags),
    ]


class Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


@functools.cache
def library() -> ctypes.CDLL:
    """The driver, initialised. Raises ``ConfigError`` where there is none."""
    try:
        loaded = ctypes.CDLL(LIBRARY)
    except OSError:
        raise ConfigError(
            f"no NVIDIA driver here ({LIBRARY} is missing); use --device cpu"
        ) from None
    code = loaded.cuInit(0)
    if code:
        raise ConfigError(f"the NVIDIA driver does not start (error {code}); use --device cpu")
    return loaded


def call(name: str, *arguments: Any) -> None:
    """Call the driver's function ``name``. Raises ``OutOfMemory`` when the device lacks memory, and
    ``RuntimeError`` with the driver's message for other failures."""
    code = getattr(library(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        library().cuGetErrorString(code, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        kind = OutOfMemory if code == _OUT_OF_MEMORY else RuntimeError
        raise kind(f"{name} failed: {reason} ({code})")
