"""Finds or makes the random models of a benchmark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def model_folder(name: str, there: Path | None, folder: Path) -> Path:
    """The folder of model ``name``, one of ``random_models.SHAPES``: below ``there``, or made in
    ``folder`` if that is None. Raises ``SystemExit`` if ``there`` lacks it, ``CalledProcessError``
    if it cannot be made."""
    if there is not None:
        if not (there / name / "config.json").exists():
            raise SystemExit(f"{there} has no model {name}")
        return there / name
    made = folder / name
    # In a process of its own: this one runs the clients and should not load torch.
    maker = (sys.executable, "-m", "ops.bench.serving.random_model", name, str(made))
    subprocess.run(maker, check=True)
    return made
