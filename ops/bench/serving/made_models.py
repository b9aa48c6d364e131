"""Where the random models of a benchmark are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def model_folder(name: str, there: Path | None, folder: Path) -> Path:
    """Model ``name``, one of ``random_models.SHAPES``: in folder ``there``, or made in ``folder``.
    Raises ``SystemExit`` when it is not there, ``CalledProcessError`` when it cannot be made."""
    if there is not None:
        if not (there / name / "config.json").exists():
            raise SystemExit(f"{there} has no model {name}")
        return there / name
    made = folder / name
    # In a process of its own, since this one should not have torch: clients run in it.
    maker = (sys.executable, "-m", "ops.bench.serving.random_model", name, str(made))
    subprocess.run(maker, check=True)
    return made
