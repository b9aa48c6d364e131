"""Device memory that several processes map: one allocation per pool, exported once.

    made by one process   cuMemCreate -> cuMemExportToShareableHandle -> a file descriptor
    mapped by each        (import) -> cuMemAddressReserve -> cuMemMap -> cuMemSetAccess

The descriptor travels over a Unix socket and keeps the memory alive by itself: as long as any
process holds it open, the pages outlive the process that made them, as a pool must. (With CUDA's
older IPC handles the memory is freed with its maker, so they are not used.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from types import TracebackType
from typing import Any, Self

import torch

from pagemesh.engine.cuda import driver


class DeviceMemory:
    """One mapped allocation. Made by ``make`` or ``adopt``; a context manager.

    ``bytes`` is a uint8 tensor over it, which must not be used after ``close``.
    """

    def __init__(self, handle: ctypes.c_ulonglong, size_bytes: int, device_index: int) -> None:
        self._handle = handle
        self._address = ctypes.c_ulonglong()
        size = ctypes.c_size_t(size_bytes)
        with contextlib.ExitStack() as undo:
            undo.callback(driver.call, "cuMemRelease", handle)
            driver.call(
                "cuMemAddressReserve", ctypes.byref(self._address), size, ctypes.c_size_t(0),
                ctypes.c_ulonglong(0), ctypes.c_ulonglong(0),
            )  # fmt: skip
            undo.callback(driver.call, "cuMemAddressFree", self._address, size)
            driver.call(
                "cuMemMap", self._address, size, ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0)
            )
            undo.callback(driver.call, "cuMemUnmap", self._address, size)
            access = driver.Access(_on(device_index), driver.ACCESS_READ_WRITE)
            driver.call(
                "cuMemSetAccess", self._address, size, ctypes.byref(access), ctypes.c_size_t(1)
            )
            self._undo = undo.pop_all()
        self._device = torch.device("cuda", device_index)
        region = _Region(self._address.value, size_bytes)
        self.bytes = torch.as_tensor(region, device=self._device)  # on another device: a copy

    @classmethod
    def make(cls, size_bytes: int, device_index: int) -> DeviceMemory:
        """New memory of at least ``size_bytes``, zeroed. Raises ``ConfigError`` without a
        driver, ``OutOfMemory`` when the device has too little."""
        with driver.WHOLE_DEVICE:
            size_bytes = rounded_up(size_bytes, _granularity_bytes(device_index))
            handle = ctypes.c_ulonglong()
            driver.call(
                "cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size_bytes),
                ctypes.byref(_properties(device_index)), ctypes.c_ulonglong(0),
            )  # fmt: skip
            made = cls(handle, size_bytes, device_index)
            made.bytes.zero_()
            # The zeros must be there before another process may write.
            torch.cuda.current_stream(made.bytes.device).synchronize()
        return made

    @classmethod
    def adopt(cls, descriptor: int, size_bytes: int, device_index: int) -> DeviceMemory:
        """Map what another process made with the same ``size_bytes``; ``descriptor`` stays the
        caller's. Raises like ``make``."""
        with driver.WHOLE_DEVICE:
            size_bytes = rounded_up(size_bytes, _granularity_bytes(device_index))
            handle = ctypes.c_ulonglong()
            driver.call(
                "cuMemImportFromShareableHandle", ctypes.byref(handle),
                ctypes.c_void_p(descriptor), ctypes.c_int(driver.HANDLE_FILE_DESCRIPTOR),
            )  # fmt: skip
            return cls(handle, size_bytes, device_index)

    def export(self) -> int:
        """A file descriptor that holds the memory; the caller closes it."""
        descriptor = ctypes.c_int()
        driver.call(
            "cuMemExportToShareableHandle", ctypes.byref(descriptor), self._handle,
            ctypes.c_int(driver.HANDLE_FILE_DESCRIPTOR), ctypes.c_ulonglong(0),
        )  # fmt: skip
        os.set_inheritable(descriptor.value, False)
        return descriptor.value

    def close(self) -> None:
        """Unmap. The memory is freed with the last mapping and the last descriptor."""
        with driver.WHOLE_DEVICE:
            torch.cuda.synchronize(self._device)
            self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Region:
    """Lets torch see memory that it did not allocate."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def enter_context(device_index: int) -> None:
    """Make torch's context the one of this thread's driver calls. Raises ``ConfigError`` without a
    driver."""
    driver.library()  # before torch looks for a device: a one-line error if there is no driver
    torch.zeros(1, device=f"cuda:{device_index}")


def rounded_up(size_bytes: int, granularity_bytes: int) -> int:
    """The smallest multiple of ``granularity_bytes`` that holds ``size_bytes``."""
    return -(-size_bytes // granularity_bytes) * granularity_bytes


def _on(device_index: int) -> driver.Location:
    return driver.Location(driver.LOCATION_DEVICE, device_index)


def _properties(device_index: int) -> driver.AllocationProperties:
    return driver.AllocationProperties(
        type=driver.ALLOCATION_PINNED,
        handle_types=driver.HANDLE_FILE_DESCRIPTOR,
        location=_on(device_index),
    )


def _granularity_bytes(device_index: int) -> int:
    found = ctypes.c_size_t()
    enter_context(device_index)
    driver.call(
        "cuMemGetAllocationGranularity", ctypes.byref(found),
        ctypes.byref(_properties(device_index)), ctypes.c_int(driver.GRANULARITY_RECOMMENDED),
    )  # fmt: skip
    return found.value
