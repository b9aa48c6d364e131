"""Makes steps of a worker hang. Python runs it at the start of a mesh's processes, as it is on
their path.

A worker whose role is the name of a file in the folder ``HANGING_STEPS`` removes the file, computes
the number of steps it contains, and never ends the next one. Its successor works normally.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

_LOOK_S = 0.01


def _hang_when_told(order: Path) -> None:
    loaded: Any = None
    while not hasattr(loaded, "ModelExecutor") or not order.exists():  # it may just have started
        time.sleep(_LOOK_S)
        loaded = sys.modules.get("pagemesh.engine.executor")
    left_count = int(order.read_text())
    compute = loaded.ModelExecutor.run

    def run(executor: object, plan: object) -> object:
        nonlocal left_count
        if not left_count:
            threading.Event().wait()
        left_count -= 1
        return compute(executor, plan)

    loaded.ModelExecutor.run = run
    loaded.ModelExecutor.run_on = lambda executor, plan, ahead: run(executor, plan)
    order.unlink()


_, _, _after = " ".join(sys.orig_argv).partition(" pagemesh.cli serve ")
if _after and "HANGING_STEPS" in os.environ:
    _order = Path(os.environ["HANGING_STEPS"]) / _after.split()[0]
    threading.Thread(target=_hang_when_told, args=(_order,), daemon=True).start()
