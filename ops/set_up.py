"""Makes ``.venv`` with everything that pagemesh needs, at the versions of ``constraints.txt``.

The Makefile calls it with the virtual environment's folder. It uses only the standard library, and
syntax and hints that older Pythons understand, so that one that is too old gets a one-line error.
Where packages come from is up to pip's configuration; no index is named here.
"""

import ctypes.util
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "ops" / "constraints.txt"
PYTHON_MIN = (3, 11)
FAILURE_LINES_MAX = 60
EXIT_STOPPED = 130
STOP_TIMEOUT_S = 10.0
CUDA_PREFIXES = ("nvidia-", "cuda-")
BUILD_NATIVE = ROOT / "kernels" / "build_native.py"
RUNS_COMPILED = "import pagemesh.pager as pager; raise SystemExit(not pager.IS_COMPILED)"


def main() -> int:
    try:
        return _set_up()
    except KeyboardInterrupt:  # likely, as it takes minutes
        _say("stopped; start it again to go on")
        return EXIT_STOPPED


def _set_up() -> int:
    if len(sys.argv) != 2:
        return _stop("give the folder of the virtual environment, e.g. .venv")
    if sys.version_info < PYTHON_MIN:
        found = ".".join(map(str, sys.version_info[:3]))
        return _stop(f"Python {found} is too old: 3.11 or newer is needed (make PYTHON=python3.12)")
    named = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if not any(shutil.which(name) for name in (named[0], "g++", "clang++")):
        return _stop("no C++ compiler found for the native library: install g++ or clang")
    venv = Path(sys.argv[1])
    python = venv / "bin" / "python"
    _say(f"making {venv} (a few minutes the first time)")
    os.environ["PIP_USER"] = "0"  # pip refuses ``user`` of a pip.conf in a venv
    if not has_pip(python) and _make(venv) != 0:
        if importlib.util.find_spec("ensurepip") is None:
            return _stop("`python3 -m venv` failed: install the venv module (Debian: python3-venv)")
        return _stop(f"{venv} could not be made; see the message above and the room on its disk")
    if _pip(python, "install", _pinned("pip")) != 0:
        return _stop("pip could not install itself; its message is above")
    cuda = cuda_requirements(_report(python, _pinned("torch")))
    if cuda and not has_nvidia_driver():
        return _stop(
            f"no NVIDIA driver here, but pip would fetch the CUDA build of torch ({len(cuda)} CUDA"
            " packages). Let pip find the CPU build, e.g. set PIP_EXTRA_INDEX_URL to the index"
            ' that holds it (README, "Quick start"). Nothing of CUDA was downloaded'
        )
    _say("installing packages, compiling the native library and the pager's core")
    flags = ["-c", str(CONSTRAINTS), "--build-constraint", str(CONSTRAINTS)]
    if _pip(python, "install", *flags, "-e", f"{ROOT}[dev]") != 0:
        return _stop("pip failed; its message is above")
    # An editable install succeeds without the library, and pip does not show why it was not built.
    if subprocess.call([str(python), str(BUILD_NATIVE), "--if-stale"]) != 0:
        return _stop("the native library was not built; its message is above")
    if subprocess.call([str(python), "-c", RUNS_COMPILED]) != 0:
        _say(
            "the pager's core was not compiled and takes twice as long. Install Python's headers"
            f" (Debian: python3-dev), then run: {python} services/compile_cores.py"
        )
    return 0


def _make(venv: Path) -> int:
    """Run ``python -m venv``; returns its exit code. Its errors are shown at the end, and not on
    Ctrl-C, where they would be a traceback."""
    command = [sys.executable, "-m", "venv", str(venv)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    sys.stderr.write(done.stderr)
    return done.returncode


def has_pip(python: Path) -> bool:
    """Whether the environment is complete: ``venv`` makes the interpreter first, and pip last."""
    command = [str(python), "-m", "pip", "--version"]
    quiet = subprocess.DEVNULL
    return python.exists() and subprocess.call(command, stdout=quiet, stderr=quiet) == 0


def has_nvidia_driver() -> bool:
    """Whether a CUDA program could run here."""
    return Path("/proc/driver/nvidia/version").exists() or bool(ctypes.util.find_library("cuda"))


def cuda_requirements(report: "dict[str, object]") -> "list[str]":
    """The requirements in a pip installation report that only a CUDA build of torch has."""
    found: list[str] = []
    installs = report.get("install")
    for item in installs if isinstance(installs, list) else []:
        lines = item["metadata"].get("requires_dist", [])
        wanted = [line for line in lines if "extra ==" not in line]
        found += [line.partition(";")[0] for line in wanted if line.startswith(CUDA_PREFIXES)]
    return found


def _report(python: Path, requirement: str) -> "dict[str, object]":
    """pip's report on what it would install for ``requirement``: metadata only, no dependencies."""
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
    """Run pip; returns its exit code. Shows progress, and pip's own output only if it fails."""
    verb, *rest = arguments
    command = [str(python), "-m", "pip", verb, "--no-input", *rest]
    if os.environ.get("VERBOSE"):
        return subprocess.call(command)
    said: deque[str] = deque(maxlen=FAILURE_LINES_MAX)
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "PIP_PROGRESS_BAR": "off"}
    with Progress(sys.stderr) as progress:
        process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace",
        )  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                said.append(line)
                progress.stage = stage_of(line) or progress.stage
            code = process.wait()
        except KeyboardInterrupt:
            _end(process)  # or it would go on changing the folder that the next run uses
            raise
        finally:
            process.stdout.close()
    if code != 0:
        sys.stderr.writelines(said)
    return code


def _end(process: "subprocess.Popen[str]") -> None:
    """Wait for a process to end that has got the terminal's Ctrl-C as well; kill it if it does
    not."""
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def stage_of(line: str) -> str:
    """The stage that a line of pip's output announces; empty if none."""
    words = line.split()
    if not words:
        return ""
    if words[0] == "Collecting" and len(words) > 1:
        return "looking up " + words[1]
    if words[0] == "Downloading" and len(words) > 1:
        return " ".join(["downloading", words[1].rsplit("/", 1)[-1], *words[2:]])
    if line.startswith("Installing collected packages"):
        return f"unpacking packages ({line.count(',') + 1})"
    if line.strip().startswith("Preparing editable metadata"):  # this step builds everything
        return "compiling the native library and the pager's core"
    if line.strip().startswith(("Installing build dependencies", "Preparing")):
        return "preparing the build"
    return ""


class Progress:
    """Shows on ``stream`` the elapsed time and the current ``stage``: in place on a terminal,
    otherwise as a line now and then. A context manager; set ``stage`` while inside."""

    def __init__(self, stream: TextIO, period_s: float = 0.0) -> None:
        self.stage = ""
        self._stream = stream
        self._in_place = stream.isatty()
        self._period_s = period_s or (1.0 if self._in_place else 20.0)
        self._started = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self._in_place:
            self._stream.write("\r\033[K")
            self._stream.flush()

    def _work(self) -> None:
        while not self._done.wait(self._period_s):
            if not self.stage:
                continue
            line = progress_line(time.monotonic() - self._started, self.stage)
            if self._in_place:
                width = shutil.get_terminal_size().columns - 1
                self._stream.write("\r\033[K" + line[:width])
            else:
                self._stream.write(line + "\n")
            self._stream.flush()


def progress_line(elapsed_s: float, stage: str) -> str:
    minutes, seconds = divmod(int(elapsed_s), 60)
    return f"set-up: {minutes}:{seconds:02d} {stage}"


def _say(line: str) -> None:
    print(f"set-up: {line}", file=sys.stderr, flush=True)


def _stop(line: str) -> int:
    _say(line)
    return 2


if __name__ == "__main__":
    sys.exit(main())
