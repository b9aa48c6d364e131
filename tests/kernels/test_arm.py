"""The native library on 64-bit ARM: it compiles, to NEON, and computes the same bits as AVX2.

Needs a compiler for ARM (Debian: ``g++-aarch64-linux-gnu``) and, to run what it makes, an emulator
(``qemu-user``). ARM has the portable level alone, which fuses products and sums there as AVX2 does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kernels.levels import LEVELS

from pagemesh.kernels.native.library import LIBRARY_PATH, CpuLevel

NATIVE = Path(__file__).parents[2] / "kernels" / "native"
PROBE = Path(__file__).with_name("level_probe.cpp")
PREFIX = "aarch64-linux-gnu-"
COMPILER = f"{PREFIX}g++"
EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")
FUSED = re.compile(r"\tfmla\tv\d+\.4s, v\d+\.4s, v\d+\.")
FUSED_MIN = 500
BUILD_S_MAX = 240

pytestmark = [pytest.mark.slow, pytest.mark.timeout(BUILD_S_MAX + 60)]


def done(command: list[str], **environ: str) -> str:
    """What a command says that is expected to succeed."""
    ran = subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, timeout=BUILD_S_MAX,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-2_000:] + ran.stderr[-2_000:]
    return ran.stdout


@pytest.fixture(scope="module")
def arm_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"there is no {COMPILER} (Debian: g++-aarch64-linux-gnu)")
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert cmake is not None
    folder = tmp_path_factory.mktemp("arm")
    target = [
        "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={COMPILER}", "-DCMAKE_CXX_FLAGS=-Werror=unused",
    ]  # fmt: skip
    done([cmake, "-S", str(NATIVE), "-B", str(folder), *target])
    done([cmake, "--build", str(folder), "--parallel", "2"])
    return folder / LIBRARY_PATH.name


def probe(compiler: str, library: Path, level: CpuLevel, folder: Path) -> list[str]:
    """A command that runs the probe at ``level`` of ``library``."""
    program = folder / f"probe-{compiler}"
    # The folder has a limits.h, which is not to be taken for the system's.
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-iquote", str(NATIVE)]
    link = [str(library), f"-Wl,-rpath,{library.parent}", "-o", str(program)]
    done([compiler, *flags, str(PROBE), *link])
    return [str(program), str(level.value)]


def test_the_library_compiles_for_arm_and_multiplies_and_adds_four_at_once(
    arm_library: Path,
) -> None:
    machine_code = done([f"{PREFIX}objdump", "-d", str(arm_library)])
    assert len(FUSED.findall(machine_code)) > FUSED_MIN


@pytest.mark.skipif(CpuLevel.AVX2 not in LEVELS, reason="there is no AVX2 to compare with")
def test_arm_computes_the_same_bits_as_avx2(arm_library: Path, tmp_path: Path) -> None:
    emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
    if emulator is None:
        pytest.skip(f"there is no {EMULATORS[0]} (Debian: qemu-user)")
    compiler_here = shutil.which("g++") or shutil.which("clang++")
    if compiler_here is None:
        pytest.skip("there is no C++ compiler")
    loader = done([COMPILER, "-print-file-name=ld-linux-aarch64.so.1"]).strip()
    emulated = [emulator, "-L", str(Path(loader).parents[1])]
    arm = probe(COMPILER, arm_library, CpuLevel.PORTABLE, tmp_path)
    avx2 = probe(Path(compiler_here).name, LIBRARY_PATH, CpuLevel.AVX2, tmp_path)
    lines = done(avx2).splitlines()
    assert done(emulated + arm).splitlines() == lines
    compared = {line.rsplit(maxsplit=2)[0] for line in lines}
    wanted = {"linear", "slim linear", "linear of rounded rows", "attention", "kv write", "drawn"}
    assert wanted <= compared
