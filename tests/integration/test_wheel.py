"""What pip makes of the sources: a wheel that needs no compiler where it is installed, or none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pagemesh.runtime.nats_server import find_nats_server

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "pyproject.toml", "README.md", "LICENSE", "kernels", "shared", "services",
    "ops/demo_model/weights",
)  # fmt: skip
NOTHING_FOUND = "no C++ compiler found (looked for g++, clang++, c++); install g++ or clang"
PIP = (sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check")
WITHOUT_MORE = ("--no-index", "--no-deps", "--no-build-isolation")
"""What a build requires is installed for tests, so that they need no package index."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="pagemesh runs on Linux"),
]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """What a wheel is made from, in a folder of its own, without the native library. Of the
    pager's core what is compiled is taken as it is: to do that again takes a minute."""
    copy = tmp_path / "sources"
    left_out = shutil.ignore_patterns("__pycache__", "libpagemesh_native*")
    for name in SOURCES:
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=left_out)
        else:
            shutil.copy2(ROOT / name, target)
    (copy / "services" / "compile_cores.py").write_text("")
    return copy


@pytest.fixture
def without_compiler(tmp_path: Path) -> dict[str, str]:
    """An environment where no tool is on the path, and nothing of pagemesh's or pip's is set."""
    (tmp_path / "no_tools").mkdir()
    left_out = ("PAGEMESH_", "PIP_", "PYTHON", "CXX", "CC", "CFLAGS", "CMAKE")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(left_out)}
    return kept | {"PATH": str(tmp_path / "no_tools")}


def hurried_compiler(folder: Path) -> str:
    """A compiler that makes nothing fast, which takes a tenth of the time: what these tests ask
    of the library is that it is there and right."""
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        pytest.skip("there is no C++ compiler")
    script = folder / "hurried"
    script.write_text(f'#!/bin/sh\nexec {found} "$@" -O0\n')
    script.chmod(0o755)
    return str(script)


def machine_without_pagemesh(folder: Path) -> Path:
    """The Python of a new environment, which has what pagemesh requires, but not pagemesh."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    required = sysconfig.get_path("purelib")
    [site] = folder.glob("lib/python*/site-packages")
    (site / "required.pth").write_text(required)  # its own .pth files are not followed
    (folder / "bin" / "nats-server").symlink_to(find_nats_server())
    return folder / "bin" / "python"


def said(command: list[str], environ: dict[str, str], cwd: Path, *, code: int = 0) -> str:
    """What a command that ends with ``code`` says on both streams."""
    done = subprocess.run(
        command, env=environ, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout[-4_000:]
    return done.stdout


WORKS = """
import torch
from pagemesh.kernels.native.library import LIBRARY_PATH
from pagemesh.kernels.ops import linear, pack_linear
rows, weights = torch.randn(3, 40), torch.randn(17, 40)
torch.testing.assert_close(linear(rows, pack_linear(weights)), rows @ weights.T)
print(LIBRARY_PATH)
"""
IS_COMPILED = "import pagemesh.pager; print(pagemesh.pager.IS_COMPILED)"


def test_a_wheel_runs_where_no_compiler_is(
    tmp_path: Path, sources: Path, without_compiler: dict[str, str]
) -> None:
    with_compiler = without_compiler | {
        "PATH": os.environ["PATH"], "CXX": hurried_compiler(tmp_path)
    }  # fmt: skip
    wheels = tmp_path / "wheels"
    build = [*PIP, "wheel", *WITHOUT_MORE, "--wheel-dir", str(wheels), str(sources)]
    said(build, with_compiler, tmp_path)
    [wheel] = wheels.iterdir()
    assert wheel.name.endswith("-py3-none-linux_" + os.uname().machine + ".whl")
    shutil.rmtree(sources)

    python = machine_without_pagemesh(tmp_path / "machine")
    install = [*PIP, "--python", str(python), "install", "--no-index", "--no-deps", str(wheel)]
    said(install, without_compiler, tmp_path)
    library = Path(said([str(python), "-c", WORKS], without_compiler, tmp_path).strip())
    assert library.is_relative_to(tmp_path / "machine")
    compiled_here = said([sys.executable, "-c", IS_COMPILED], without_compiler, tmp_path)
    assert said([str(python), "-c", IS_COMPILED], without_compiler, tmp_path) == compiled_here

    pagemesh = str(python.with_name("pagemesh"))
    assert said([pagemesh, "--version"], without_compiler, tmp_path).startswith("pagemesh")
    pools = without_compiler | {"PAGEMESH_POOL_DIR": str(tmp_path / "pools")}
    found = said([pagemesh, "doctor"], pools, tmp_path)
    assert f"pagemesh-demo in {library.parents[2]}" in found, "the demo model comes with it"

    library.unlink()
    found = said([pagemesh, "doctor"], pools, tmp_path, code=1)
    assert f"{library} is missing; install a wheel of pagemesh that was built for" in found
    assert "build_native.py" not in found, "a wheel does not have it"


def test_no_wheel_is_made_without_a_compiler(
    tmp_path: Path, sources: Path, without_compiler: dict[str, str]
) -> None:
    wheels = tmp_path / "wheels"
    build = [*PIP, "wheel", *WITHOUT_MORE, "--wheel-dir", str(wheels), str(sources)]
    lines = [line.strip() for line in said(build, without_compiler, tmp_path, code=1).splitlines()]
    told = f"pagemesh's native library was not built, so no wheel is: {NOTHING_FOUND}"
    assert lines.count(told) == 1, lines
    assert not any(line.startswith("Traceback") for line in lines)
    assert not wheels.exists() or not list(wheels.iterdir())


def test_a_checkout_is_installed_without_a_compiler_and_start_up_says_what_to_run(
    tmp_path: Path, sources: Path, without_compiler: dict[str, str]
) -> None:
    python = machine_without_pagemesh(tmp_path / "machine")
    install = [*PIP, "--python", str(python), "install", *WITHOUT_MORE, "-e", str(sources)]
    said(install, without_compiler, tmp_path)
    pools = without_compiler | {"PAGEMESH_POOL_DIR": str(tmp_path / "pools")}
    found = said([str(python.with_name("pagemesh")), "doctor"], pools, tmp_path, code=1)
    script = sources / "kernels" / "build_native.py"
    assert f"is missing; build it with: python {script} (needs g++ or clang, and cmake)" in found
    assert NOTHING_FOUND in said([str(python), str(script)], without_compiler, tmp_path, code=1)
