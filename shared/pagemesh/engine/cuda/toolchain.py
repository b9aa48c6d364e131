"""What Triton needs, besides a driver, to run kernels on a machine's GPU.

None of it is needed to install Triton, so otherwise the first kernel would be the first to fail."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from pagemesh.runtime.user_paths import naming
from pagemesh.wire.errors import ConfigError


def check_toolchain() -> str:
    """What was found, as text for people. Triton builds its launchers with a C compiler and
    Python's headers, and keeps them and its kernels in a folder. Raises ``ConfigError``, one
    sentence."""
    compiler = os.environ.get("CC") or "gcc"
    found = shutil.which(compiler) or (None if "CC" in os.environ else shutil.which("clang"))
    if found is None:
        raise ConfigError(
            "Triton needs a C compiler to launch kernels on a GPU, and there is no "
            f"{compiler}{'' if 'CC' in os.environ else ' or clang'}; install gcc (Debian: gcc and "
            "libc6-dev), or name one with CC"
        )
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = Path(sysconfig.get_paths(scheme=scheme)["include"])
    if not (headers / "Python.h").is_file():
        raise ConfigError(
            f"Triton needs Python's headers to launch kernels on a GPU, and {headers} has no "
            "Python.h; install them (Debian: python3-dev)"
        )
    folder = cache_folder()
    with naming(f"Triton's folder {folder} (TRITON_CACHE_DIR)"):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"Triton keeps compiled kernels in {folder}, and {existing} cannot be written; name "
            "another folder with TRITON_CACHE_DIR"
        )
    return f"{found}, kernels are kept in {folder}"


def cache_folder() -> Path:
    """Where Triton keeps compiled kernels, by its own rules."""
    if named := os.environ.get("TRITON_CACHE_DIR"):
        return Path(named).absolute()
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~/")
    return (Path(home) / ".triton" / "cache").absolute()
