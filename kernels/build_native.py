"""Build the native library: as hatchling's build hook, or by hand.

    python kernels/build_native.py [--if-stale]

compiles ``kernels/native`` with CMake and puts ``libpagemesh_native.so`` beside
``pagemesh/kernels/native/library.py``, in one atomic rename, so that running processes keep
the library they have mapped. A wheel always contains the library: where it cannot be built, the
wheel fails with one line that says what to install. An editable install succeeds without it;
start-up then names the missing library and this command.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, outside a build: the base class is not needed
    BuildHookInterface = object

SOURCE_ROOT = Path(__file__).resolve().parent
LIBRARY_NAME = "libpagemesh_native.so"
LIBRARY_PATH = SOURCE_ROOT / "pagemesh" / "kernels" / "native" / LIBRARY_NAME
BUILD_FOLDER = SOURCE_ROOT.parent / "build" / "native"
COMPILE_CORES = SOURCE_ROOT.parent / "services" / "compile_cores.py"
DEMO_MODEL = SOURCE_ROOT.parent / "ops" / "demo_model" / "weights"
COMPILERS = ("g++", "clang++", "c++")
OUTPUT_LINES_MAX = 20


class BuildFailed(Exception):
    """The library could not be built; the message says why in one line."""


def _tool(*names: str) -> str:
    """The first of ``names`` found beside this interpreter or on the path, else ``""``."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for name in names:
        if found := shutil.which(name, path=path):
            return found
    return ""


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()[-OUTPUT_LINES_MAX:]
        raise BuildFailed(f"{Path(command[0]).name} failed: " + "\n  ".join(lines))


def build() -> Path:
    """Compile and install the library; returns its path. Raises ``BuildFailed``."""
    began_s = time.time()
    compiler = _tool(*COMPILERS)
    named = bool(os.environ.get("CXX"))  # may contain arguments, which CMake splits off
    if not compiler and not named:
        looked_for = ", ".join(COMPILERS)
        raise BuildFailed(f"no C++ compiler found (looked for {looked_for}); install g++ or clang")
    cmake = _tool("cmake")
    if not cmake:
        raise BuildFailed("cmake not found; install it")
    generator = ["-G", "Ninja"] if (ninja := _tool("ninja")) else []
    program = [f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    if (cache := BUILD_FOLDER / "CMakeCache.txt").exists():
        cache.unlink()  # it may be from another compiler or build environment
    folders = ["-S", str(SOURCE_ROOT / "native"), "-B", str(BUILD_FOLDER)]
    compile_with = [] if named else [f"-DCMAKE_CXX_COMPILER={compiler}"]
    release = "-DCMAKE_BUILD_TYPE=Release"
    _run([cmake, *folders, *generator, *program, *compile_with, release])
    _run([cmake, "--build", str(BUILD_FOLDER)])
    fresh = LIBRARY_PATH.with_suffix(f".{os.getpid()}.new")
    shutil.copy(BUILD_FOLDER / LIBRARY_NAME, fresh)
    # Date the library to the start of the build. The link may be much older, if nothing had to be
    # linked again; the copy is too new, since a source may have changed during the build.
    os.utime(fresh, (began_s, began_s))
    fresh.replace(LIBRARY_PATH)
    return LIBRARY_PATH


def is_stale() -> bool:
    """Whether the library is missing or older than a source."""
    if not LIBRARY_PATH.exists():
        return True
    built_s = LIBRARY_PATH.stat().st_mtime
    sources = SOURCE_ROOT.joinpath("native").iterdir()
    return any(path.is_file() and path.stat().st_mtime > built_s for path in sources)


class NativeLibraryHook(BuildHookInterface):  # type: ignore[misc]  # hatchling ships no types
    """Compiles the library and the pager's core (``services/compile_cores.py``) before files are
    collected, for wheels and editable installs alike."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        if version != "editable" and DEMO_MODEL.is_dir():
            build_data["force_include"][str(DEMO_MODEL)] = "pagemesh/runtime/demo_model"
        try:
            build()
        except BuildFailed as error:
            if version != "editable":
                # pip hides warnings, and would keep the platform-independent wheel in its cache.
                self.app.abort(f"pagemesh's native library was not built, so no wheel is: {error}")
            self.app.display_warning(
                f"pagemesh is installed without its native library: {error}. "
                f"Then run: python {Path(__file__).resolve()}"
            )
            return
        try:
            _run([sys.executable, str(COMPILE_CORES), "--if-stale"])
        except BuildFailed as error:
            self.app.display_warning(
                f"pagemesh is installed with an interpreted pager, half as fast: {error}"
            )
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"


def main() -> int:
    if "--if-stale" in sys.argv[1:] and not is_stale():
        return 0
    try:
        path = build()
    except BuildFailed as error:
        sys.stderr.write(f"the native library was not built: {error}\n")
        return 1
    sys.stdout.write(f"built {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
