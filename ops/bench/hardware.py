"""The commit and the machine that a benchmark ran on, for every JSON report."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

_MEASURED = (":(top)", ":(top,exclude)ops/bench/results", ":(top,exclude)ops/docs")
"""The files that a figure may depend on: all but docs and the reports of earlier benchmarks."""


def describe() -> dict[str, object]:
    """Commit (with ``+`` when the tree differs from it), processor, cores and load."""
    return {
        "commit": _commit(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 0,
        "machine": platform.machine(),
        # Without the suffix that a distribution or a provider adds.
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _commit() -> str:
    commit = _git("rev-parse", "--short=12", "HEAD")
    if commit is None:
        return "unknown"
    told = _git("status", "--porcelain", "--untracked-files=no", "--", *_MEASURED)
    return commit + ("+" if told else "")


def _git(*arguments: str) -> str | None:
    """The output of git; None if it fails."""
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", *arguments], cwd=here, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    fields = dict(
        line.split(":", 1) for line in text.splitlines() if line.startswith(("model ", "vendor_id"))
    )
    values = {name.strip(): value.strip() for name, value in fields.items()}
    return " ".join(f"{name} {values[name]}" for name in ("model name", "model") if name in values)
