"""Device memory, as far as it can be tested without a device."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from pagemesh.engine.cuda import driver
from pagemesh.engine.cuda.memory import DeviceMemory, rounded_up
from pagemesh.wire.errors import ConfigError


def test_structures_are_as_large_as_those_of_the_driver() -> None:
    assert ctypes.sizeof(driver.Location) == 8
    assert ctypes.sizeof(driver.AllocationFlags) == 8
    assert ctypes.sizeof(driver.AllocationProperties) == 32
    assert ctypes.sizeof(driver.Access) == 12


def test_without_a_driver_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libcuda-that-is-not-there.so")
    driver.library.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"no NVIDIA driver here .* use --device cpu"):
            DeviceMemory.make(1 << 20, 0)
    finally:
        driver.library.cache_clear()


def test_memory_comes_in_whole_grains() -> None:
    assert [rounded_up(size, 1 << 21) for size in (1, 1 << 21, (1 << 21) + 1)] == [
        1 << 21,
        1 << 21,
        1 << 22,
    ]


def test_importing_the_gpu_engine_starts_neither_cuda_nor_triton() -> None:
    code = (
        "import sys, torch; "
        "import pagemesh.engine.cuda.decoder, pagemesh.engine.cuda.memory; "
        "assert not torch.cuda.is_initialized(); "
        "assert 'triton' not in sys.modules, 'triton'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
