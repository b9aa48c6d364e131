"""Makes ``.venv``: everything pagemesh needs, at the versions of ``constraints.txt``.

Called by the Makefile with the virtual environment's folder. Uses the standard library only
and syntax that older Pythons can read, so that a too old one is told so in one line. Where
packages come from is pip's own configuration; nothing here names an index.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "ops" / "constraints.txt"
PYTHON_MIN = (3, 11)
CUDA_PREFIXES = ("nvidia-", "cuda-")


def main() -> int:
    if len(sys.argv) != 2:
        return _stop("give the folder of the virtual environment, e.g. .venv")
    if sys.version_info < PYTHON_MIN:
        found = ".".join(map(str, sys.version_info[:3]))
        return _stop(f"Python {found} is too old: 3.11 or newer is needed (make PYTHON=python3.12)")
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        return _stop("no C++ compiler found for the native library: install g++ or clang")
    venv = Path(sys.argv[1])
    python = venv / "bin" / "python"
    _say(f"making {venv} (a few minutes the first time)")
    if not python.exists() and subprocess.call([sys.executable, "-m", "venv", str(venv)]) != 0:
        return _stop("`python3 -m venv` failed: install the venv module (Debian: python3-venv)")
    if _pip(python, "install", _pinned("pip")) != 0:
        return _stop("pip could not install itself; its message is above")
    driver = has_nvidia_driver()
    cuda = cuda_requirements(_report(python, _pinned("torch")))
    if cuda and not driver:
        return _stop(
            f"no NVIDIA driver here, but pip would fetch the CUDA build of torch ({len(cuda)} CUDA"
            " packages). Let pip find the CPU build, e.g. set PIP_EXTRA_INDEX_URL to the index"
            ' that holds it (README, "Quick start"). Nothing of CUDA was downloaded'
        )
    extras = "dev,cuda" if driver else "dev"
    _say("installing packages and compiling the native library")
    flags = ["-c", str(CONSTRAINTS), "--build-constraint", str(CONSTRAINTS)]
    if _pip(python, "install", *flags, "-e", f"{ROOT}[{extras}]") != 0:
        return _stop("pip failed; its message is above")
    return 0


def has_nvidia_driver() -> bool:
    """Whether a CUDA program could run here."""
    return Path("/proc/driver/nvidia/version").exists() or bool(ctypes.util.find_library("cuda"))


def cuda_requirements(report: dict[str, object]) -> list[str]:
    """The requirements of a pip installation report that only a CUDA build has."""
    found: list[str] = []
    installs = report.get("install")
    for item in installs if isinstance(installs, list) else []:
        lines = item["metadata"].get("requires_dist", [])
        wanted = [line for line in lines if "extra ==" not in line]
        found += [line.partition(";")[0] for line in wanted if line.startswith(CUDA_PREFIXES)]
    return found


def _report(python: Path, requirement: str) -> dict[str, object]:
    """What pip would install for ``requirement`` alone: metadata only, no dependencies."""
    command = [
        str(python), "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed",
        "--no-deps", "--report", "-", requirement,
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise SystemExit(_stop(f"pip finds no {requirement}; its message is above"))
    report: dict[str, object] = json.loads(done.stdout)
    return report


def _pinned(name: str) -> str:
    for line in CONSTRAINTS.read_text().splitlines():
        if line.lower().startswith(name + "=="):
            return line.strip()
    raise SystemExit(_stop(f"ops/constraints.txt does not pin {name}"))


def _pip(python: Path, *arguments: str) -> int:
    quiet = [] if os.environ.get("VERBOSE") else ["-qq"]
    verb, *rest = arguments
    return subprocess.call([str(python), "-m", "pip", verb, *quiet, "--no-input", *rest])


def _say(line: str) -> None:
    print(f"set-up: {line}", file=sys.stderr, flush=True)


def _stop(line: str) -> int:
    _say(line)
    return 2


if __name__ == "__main__":
    sys.exit(main())
