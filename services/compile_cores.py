"""Compile the pager's core to extension modules with mypyc: as part of a build, or by hand.

    python services/compile_cores.py [--if-stale]

Compiling is optional: the sources are ordinary Python and run interpreted without it. The extension
modules are written to ``pagemesh/pager/compiled``; ``pagemesh.runtime.compiled`` uses them for as
long as the sources have not changed since.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "shared"))

from pagemesh.runtime.compiled import FOLDER, STAMP, SUFFIX, stamp_of  # noqa: E402

PAGER = ROOT / "services" / "pagemesh" / "pager"
USED = ROOT / "shared" / "pagemesh" / "wire"
"""Sources whose types the compiled modules depend on; a change to them makes those stale too."""
CORES = (
    "books", "recovery", "regrow", "state", "eviction/*", "leases/*", "pages/*", "retention/*",
    "tree/*",
)  # fmt: skip
INTERPRETED = ("leases/states.py", "pages/ledger_error.py")
"""Not compiled: mypyc does not support subclasses of most built-in classes."""
BUILD_FOLDER = ROOT / "build" / "cores"
GROUP = "pagemesh_pager"
MYPY_FLAGS = (
    "--config-file=", "--explicit-package-bases", "--namespace-packages",
    "--ignore-missing-imports", "--follow-imports=silent",
)  # fmt: skip
LINES_MAX = 20


def sources() -> list[Path]:
    """The modules to compile."""
    left_out = {PAGER / name for name in INTERPRETED}
    found = {file for core in CORES for file in PAGER.glob(f"{core}.py")}
    return sorted(file for file in found - left_out if file.name != "__init__.py")


def is_stale() -> bool:
    """Whether compiled modules are missing, or come from other sources or another recipe."""
    stamp, folder = PAGER / FOLDER / STAMP, PAGER / FOLDER
    if not stamp.exists():
        return True
    made_from, recipe, *names = stamp.read_text().split()
    if (made_from, recipe) != (stamp_of([PAGER, USED]), _recipe()):
        return True
    return not all((folder / name).exists() for name in names)


def _recipe() -> str:
    """Identifies how the modules are compiled: the hash of this file."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def compile_cores() -> Path:
    """Compile and install the modules; returns their folder. Raises ``ChildProcessError`` with the
    last lines of the compiler's output."""
    shutil.rmtree(BUILD_FOLDER, ignore_errors=True)
    BUILD_FOLDER.mkdir(parents=True)
    made_from = stamp_of([PAGER, USED])
    search = os.pathsep.join(str(ROOT / name) for name in ("services", "shared", "kernels"))
    done = subprocess.run(
        [sys.executable, __file__, "mypyc", *map(str, sources())],
        cwd=BUILD_FOLDER, env={**os.environ, **_compiler(), "MYPYPATH": search},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        said = (done.stdout + done.stderr).splitlines()
        raise ChildProcessError("\n  ".join(said[-LINES_MAX:]))
    folder, built, fresh = PAGER / FOLDER, BUILD_FOLDER / "built", BUILD_FOLDER / FOLDER
    fresh.mkdir()
    names: list[str] = []
    for file in built.rglob(f"*{SUFFIX}"):
        names.append(".".join(file.relative_to(built).parts))
        shutil.copy2(file, fresh / names[-1])
    (fresh / STAMP).write_text("\n".join([made_from, _recipe(), *sorted(names)]))
    (folder / STAMP).unlink(missing_ok=True)  # a pager that starts now runs the sources
    shutil.rmtree(folder, ignore_errors=True)
    shutil.move(fresh, folder)
    return folder


def _compiler() -> dict[str, str]:
    """Environment variables that select clang if the compiler that Python was built with is
    missing."""
    built_with = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if "CC" in os.environ or shutil.which(built_with) or not shutil.which("clang"):
        return {}
    return {"CC": "clang"}


def run_mypyc(files: list[str]) -> None:
    """Compile ``files``. Run in a process and a folder of its own, since mypyc writes to the
    current folder and exits the process on an error."""
    from mypyc.build import mypycify
    from setuptools import Distribution

    extensions = mypycify(
        [*MYPY_FLAGS, *files], group_name=GROUP, opt_level="3", debug_level="0", multi_file=True
    )
    build = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
    build.build_lib, build.build_temp, build.parallel = "built", "objects", os.cpu_count()
    build.ensure_finalized()
    build.run()


def main() -> int:
    if sys.argv[1:2] == ["mypyc"]:
        run_mypyc(sys.argv[2:])
        return 0
    if sys.argv[1:] == ["--if-stale"] and not is_stale():
        return 0
    try:
        folder = compile_cores()
    except ChildProcessError as error:
        sys.stderr.write(f"the pager's core was not compiled: {error}\n")
        return 1
    sys.stdout.write(f"compiled {len(sources())} modules into {folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
