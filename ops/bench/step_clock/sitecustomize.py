"""Times the steps of a worker from within, for ``bench_share``.

Python imports a module of this name from ``PYTHONPATH`` when it starts: the benchmark puts this
folder there. In a worker, every call of its executor is recorded as eight float64 (``FIELDS``),
with times of the performance counter, which all processes of a host share. They are written to a
file in the folder that ``BENCH_STEP_CLOCK`` names when the worker ends, so that nothing is written
while it computes. While the first byte of the file ``apart`` there is not 0, each call is one step:
the steps of a run pass within one native call, whose parts cannot be timed separately.
"""

from __future__ import annotations

import array
import atexit
import mmap
import os
import sys
import time
from pathlib import Path

FIELDS = ("began", "ended", "steps", "run", "products", "attention", "rows", "sampling")
"""Start and end, number of steps, and seconds: in a native run, or in the parts of a step that is a
call by itself."""


def install(folder: Path) -> None:
    """Record the calls of this process's executor from now on."""
    from pagemesh.kernels.native.library import bound_spinning

    bound_spinning()  # as a worker does, before torch
    from pagemesh.engine import sampler
    from pagemesh.engine.executor import ModelExecutor
    from pagemesh.kernels.decoder_step import DecoderStep, phases

    with (folder / "apart").open("r+b") as file:
        apart = mmap.mmap(file.fileno(), 1)
    notes = array.array("d")
    spent_us = phases()  # of the current call, as are the next two
    other_s = {"run": 0.0, "sampling": 0.0}
    run_on, step, run, draw = (
        ModelExecutor.run_on, DecoderStep.__call__, DecoderStep.run, sampler.draw,
    )  # fmt: skip

    def noted_step(self, *given, **options):  # type: ignore[no-untyped-def]
        options["phase_us"] = spent_us
        return step(self, *given, **options)

    def noted_run(self, *given):  # type: ignore[no-untyped-def]
        done = run(self, *given)
        other_s["run"] += float(done.took_us.sum()) / 1e6
        return done

    def noted_draw(*given):  # type: ignore[no-untyped-def]
        began_s = time.perf_counter()
        drawn = draw(*given)
        other_s["sampling"] += time.perf_counter() - began_s
        return drawn

    def noted_call(self, plan, ahead):  # type: ignore[no-untyped-def]
        spent_us.zero_()
        other_s["run"] = other_s["sampling"] = 0.0
        began_s = time.perf_counter()
        result = self.run(plan) if apart[0] else run_on(self, plan, ahead)
        ended_s = time.perf_counter()
        products_s, attention_s, rows_s = (spent_us / 1e6).tolist()
        notes.extend((
            began_s, ended_s, len(result.took_us), other_s["run"],
            products_s, attention_s, rows_s, other_s["sampling"],
        ))  # fmt: skip
        return result

    DecoderStep.__call__ = noted_step  # type: ignore[method-assign]
    DecoderStep.run = noted_run  # type: ignore[method-assign]
    ModelExecutor.run_on = noted_call  # type: ignore[method-assign]
    sampler.draw = noted_draw
    atexit.register(lambda: (folder / f"{os.getpid()}.steps").write_bytes(notes.tobytes()))


if "BENCH_STEP_CLOCK" in os.environ and {"prefill", "decode"} & set(sys.orig_argv):
    install(Path(os.environ["BENCH_STEP_CLOCK"]))
