"""The native library in processes of its own: levels, threads, and when it is missing."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kernels.levels import EVERY_LEVEL, LEVELS

from pagemesh.kernels import dispatch
from pagemesh.kernels.native import library
from pagemesh.kernels.native.library import SPIN_VARIABLE, CpuLevel
from pagemesh.wire.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]


def run(code: str, **environment: str) -> str:
    # Other tests of this run may have bounded their own threads' spinning.
    without = (SPIN_VARIABLE, *dispatch.BINDING_VARIABLES)
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
        cwd=REPOSITORY,
    )
    return done.stdout.strip()


LEVEL = "from pagemesh.kernels.native.library import cpu_level; print(cpu_level().name.lower())"


@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_the_environment_forces_a_level(level: CpuLevel) -> None:
    name = level.name.lower()
    assert run(LEVEL, PAGEMESH_CPU_LEVEL=name) == name


def test_levels_that_this_machine_lacks_are_skipped_and_not_left_out() -> None:
    assert [parameter.values for parameter in EVERY_LEVEL] == [(level,) for level in CpuLevel]
    run_here = [parameter.values for parameter in EVERY_LEVEL if not parameter.marks]
    assert run_here == [(level,) for level in LEVELS]


def test_the_best_level_of_the_machine_is_the_default() -> None:
    assert run(LEVEL, PAGEMESH_CPU_LEVEL="") == max(LEVELS).name.lower()


CONFIG_ERROR = """
from pagemesh.wire.errors import ConfigError
from pagemesh.kernels.native.library import cpu_level
try:
    cpu_level()
except ConfigError as error:
    print(error)
"""


def test_an_unknown_level_is_named() -> None:
    assert run(CONFIG_ERROR, PAGEMESH_CPU_LEVEL="sse9") == (
        "PAGEMESH_CPU_LEVEL=sse9 is not one of portable, avx2, avx512, avx512_bf16, amx"
    )


def test_a_backend_is_chosen_by_name_and_an_unknown_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose = dispatch.backend.__wrapped__
    monkeypatch.delenv(dispatch.BACKEND_VARIABLE, raising=False)
    assert choose() is dispatch.Backend.NATIVE
    monkeypatch.setenv(dispatch.BACKEND_VARIABLE, "reference")
    assert choose() is dispatch.Backend.REFERENCE
    monkeypatch.setenv(dispatch.BACKEND_VARIABLE, "fast")
    with pytest.raises(ConfigError, match="PAGEMESH_KERNELS=fast is neither native nor reference"):
        choose()


def test_levels_have_identities_of_their_own(level: CpuLevel) -> None:
    assert dispatch.identity() == f"native-{library.ABI_VERSION}-{level.name.lower()}"


def test_a_missing_library_says_how_to_build_it_or_to_install_it_where_a_wheel_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "LIBRARY_PATH", tmp_path / "libpagemesh_native.so")
    script = REPOSITORY / "kernels" / "build_native.py"
    with pytest.raises(ConfigError, match=rf"is missing; build it with: python {script} \(needs"):
        library.library.__wrapped__()
    (tmp_path / "libpagemesh_native.so").write_bytes(b"not a library")
    with pytest.raises(ConfigError, match=r"does not load: .*build it with"):
        library.library.__wrapped__()
    monkeypatch.setattr(library, "BUILD_SCRIPT", tmp_path / "build_native.py")
    with pytest.raises(ConfigError, match=r"does not load: .*install a wheel of pagemesh"):
        library.library.__wrapped__()


RUNTIMES = """
import sys
FIRST
import torch
from pagemesh.kernels.ops import linear, pack_linear
torch.set_num_threads(2)
linear(torch.randn(64, 512), pack_linear(torch.randn(512, 512)))
torch.randn(512, 512) @ torch.randn(512, 512)
maps = [line.split()[-1] for line in open("/proc/self/maps") if len(line.split()) > 5]
print(sorted({path for path in maps if "omp" in path.rsplit("/", 1)[-1]}))
"""
KERNELS_FIRST = """
from pagemesh.kernels.native.library import lend_threads
assert lend_threads()
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("first", ["", KERNELS_FIRST], ids=["torch first", "kernels first"])
def test_torch_and_the_kernels_share_one_threading_runtime(first: str) -> None:
    runtimes = run(RUNTIMES.replace("FIRST", first))
    assert runtimes.count(".so") == 1, runtimes
    assert "torch" in runtimes


THREADLESS = """
import pagemesh.kernels.native.headers
from pagemesh.kernels.native.library import library
library()
print("omp" in open("/proc/self/maps").read(), "torch" in __import__("sys").modules)
"""


def test_a_process_that_only_shares_pages_loads_neither_torch_nor_threads() -> None:
    assert run(THREADLESS) == "False False"


@pytest.mark.skipif(shutil.which("readelf") is None, reason="nothing here reads libraries")
def test_the_library_needs_no_runtime_of_its_language() -> None:
    done = subprocess.run(
        ["readelf", "-d", str(library.LIBRARY_PATH)], capture_output=True, text=True, check=True
    )
    needed = [line for line in done.stdout.splitlines() if "NEEDED" in line]
    assert needed
    assert not [line for line in needed if "stdc++" in line or "libc++" in line or "gcc" in line]


def test_a_change_of_the_interface_is_noticed() -> None:
    """With another digest the number goes up too: a library that was built before is refused then,
    and would otherwise crash or read weights wrongly."""
    folder = REPOSITORY / "kernels" / "native"
    text = "".join((folder / name).read_text() for name in ("pagemesh_native.h", "slim_layout.h"))
    code = "".join(re.sub("//.*", "", text).split())
    known = (20, "b15ba394ec2d41ef")
    assert (library.ABI_VERSION, hashlib.sha256(code.encode()).hexdigest()[:16]) == known


def test_a_build_without_a_compiler_is_told_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", str(REPOSITORY / "kernels" / "build_native.py")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("the native library was not built: no C++ compiler found")
    assert done.stderr.endswith("; install g++ or clang\n")
    assert done.stderr.count("\n") == 1


SPINNING = """
import os
from pagemesh.kernels.native.library import bound_spinning
bound_spinning()
print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("UNRELATED", "1", "1000"),
        ("GOMP_SPINCOUNT", "77", "77"),
        ("OMP_WAIT_POLICY", "passive", "None"),
    ],
)
def test_idle_threads_spin_briefly_unless_the_user_said_otherwise(
    variable: str, value: str, expected: str
) -> None:
    assert run(SPINNING, **{variable: value}) == expected


linux_with_cores = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2,
    reason="threads are bound on Linux only, and to one core of several",
)
MASKS = """
import os

def masks():
    found = []
    for task in os.listdir("/proc/self/task"):
        try:
            found.append(frozenset(os.sched_getaffinity(int(task))))
        except ProcessLookupError:
            pass  # it ended since it was listed: OpenMP's threads outlive whoever began them
    return found
"""
PLACES = (
    MASKS
    + """
import threading
import torch
from pagemesh.kernels.dispatch import use_threads
from pagemesh.kernels.ops import linear, pack_linear

everywhere = os.sched_getaffinity(0)
weights, rows = pack_linear(torch.randn(2048, 512)), torch.randn(256, 512)

def compute():
    use_threads(len(everywhere))
    linear(rows, weights)
    other = threading.Thread(target=compute_unbound)
    other.start()
    other.join()
    print(sorted(core for mask in masks() if len(mask) == 1 for core in mask) == sorted(everywhere))
    use_threads(1)
    print(os.sched_getaffinity(0) == everywhere)

def compute_unbound():
    os.sched_setaffinity(0, everywhere)  # whoever made it is bound
    torch.set_num_threads(len(everywhere))
    linear(rows, weights)
    print(os.sched_getaffinity(0) == everywhere)

computing = threading.Thread(target=compute)
computing.start()
computing.join()
print(os.sched_getaffinity(os.getpid()) == everywhere)
"""
)


@linux_with_cores
def test_as_many_threads_as_cores_have_one_each_and_fewer_or_others_run_anywhere() -> None:
    assert run(PLACES) == "True\nTrue\nTrue\nTrue"


BOUND_BY_USER = (
    MASKS
    + """
import threading
import torch
from pagemesh.kernels.dispatch import use_threads
from pagemesh.kernels.ops import linear, pack_linear

weights, rows = pack_linear(torch.randn(2048, 512)), torch.randn(256, 512)

def compute():
    use_threads(2)
    linear(rows, weights)
    print(len(set(masks())))

computing = threading.Thread(target=compute)
computing.start()
computing.join()
"""
)


@linux_with_cores
@pytest.mark.parametrize("variable", ["OMP_PROC_BIND", "GOMP_CPU_AFFINITY"])
def test_threads_that_the_user_has_bound_stay_where_they_are(variable: str) -> None:
    places = " ".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    value = places if variable == "GOMP_CPU_AFFINITY" else "true"
    assert run(BOUND_BY_USER, **{variable: value}) == "2", "not all on one core"


BESIDE = """
import ctypes, sys, threading, time
from pagemesh.kernels.native.library import library
native, word, begin, counted = library(), ctypes.c_uint32(), threading.Event(), []
def other():
    begin.wait()
    counted.append(1)
thread = threading.Thread(target=other)
thread.start()
sys.setswitchinterval(60.0)
begin.set()
end_s = time.monotonic() + 0.05
while time.monotonic() < end_s:
    native.pm_word_advance(ctypes.byref(word))
brief = len(counted)
while not counted:
    native.pm_word_await(ctypes.byref(word), word.value, 1_000)
print(brief, len(counted))
"""


def test_only_calls_that_may_take_long_let_other_threads_of_the_interpreter_in() -> None:
    assert run(BESIDE) == "0 1"
