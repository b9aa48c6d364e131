"""A worker's step against the machine: how close it comes to its floor, and where the rest goes.

    python -m ops.bench.bench_step [--models S M L] [--weights float32 bfloat16] [--round-rows]
        [--threads 2] [--turns 15] [--out PATH]

Random weights in the shapes of ``random_models``. One step of the production executor, sampling
included: decoding batches of 1, 8 and 32 sequences at 512 tokens of context, and a prompt of 512
tokens. The floor is max(bytes / bandwidth, operations / arithmetic), with the bytes of weights and
of K and V that have to be read. Bandwidth is measured by streaming those very weights, arithmetic
by multiply-adds in the nearest cache, both in the same run, in turns with the steps. Weights of
each type have the floor of their own bytes. ``of_floor_median``, which the aims refer to, is the
median over turns, each relative to its own floor; for ``of_floor``, the best turn counts on both
sides. Above 1, a step has read its weights faster than the probe, which only says that nothing is
left to gain. ``in_run`` is a step of a run: those that workers compute one after the other in one
call while nothing else has to be decided (``engine/run_ahead.py``), sampling and the costs of the
call included. ``of_matmul_floor`` uses the arithmetic that torch's matrix product reaches. With
matrix tiles or rounded rows (``--round-rows``: as with ``--dtype bfloat16`` and ``int8``), a prompt
may take less than its floor, which assumes vectors of float32.

On a machine with other load, GOMP_CPU_AFFINITY="0 1" keeps the scheduler from putting both threads
on one core.
"""

from __future__ import annotations

# isort: off
import ops.bench.as_workers  # noqa: F401  (before torch)

# isort: on
import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ops.bench.aims import OF_FLOOR, of_aim
from ops.bench.hardware import describe
from ops.bench.random_models import random_config, random_weights

from pagemesh.engine.executor import ModelExecutor
from pagemesh.engine.forward import Decoder
from pagemesh.engine.model import DecoderConfig
from pagemesh.engine.pool import WorkerPool
from pagemesh.engine.sampler import draw
from pagemesh.engine.weights import DecoderWeights
from pagemesh.engine.worker.plan import Ahead, Sample, StepPlan, StepRow
from pagemesh.kernels.decoder_step import phases
from pagemesh.kernels.dispatch import native
from pagemesh.kernels.linear.packed import ROUNDING_TYPES
from pagemesh.kernels.native.header_writer import HeaderWriter
from pagemesh.kernels.native.pool_file import PoolFile
from pagemesh.kernels.native.superblock import Superblock
from pagemesh.kernels.ops import PackedLinear, PageLayout, identity
from pagemesh.kernels.weight_types import WEIGHT_TYPES, WeightType
from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.pool_format import HeaderState, PoolFormat
from pagemesh.wire.tokens import U32, pack_extents
from pagemesh.wire.work_messages import Sampling

CONTEXT_TOKENS, PAGE_SIZE, BATCH_MAX = 512, 16, 32
RUN_STEPS = 8
PAGES = -(-(CONTEXT_TOKENS + RUN_STEPS) // PAGE_SIZE)
GRANTED_AT = 5
PROBE_ROUNDS = 200_000
_ANY_US = 60_000_000
SQUARE = 1024
PHASES = ("products", "attention", "rows", "sampling", "python")


@dataclass(frozen=True, slots=True)
class Case:
    """``batch`` sequences; of each, the last ``tokens`` of the context are computed."""

    name: str
    batch: int
    tokens: int


CASES = (
    Case("batch 1", 1, 1),
    Case("batch 8", 8, 1),
    Case("batch 32", 32, 1),
    Case("prefill 512", 1, CONTEXT_TOKENS),
)


class TimedDecoder(Decoder):
    """Records where the time of the last step went."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, *, deterministic: bool = False
    ) -> None:
        super().__init__(config, weights, deterministic=deterministic)
        self.phase_us = phases()

    def step(
        self, *arguments: object, **options: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.phase_us.zero_()
        return super().step(*arguments, **options, phase_us=self.phase_us)  # type: ignore[arg-type]


class Bench:
    """One model over a pool file whose pages hold random K and V and are all granted."""

    def __init__(
        self, name: str, weight_type: WeightType, folder: Path, *, rounds_rows: bool
    ) -> None:
        self.config = random_config(name)
        self.weights = random_weights(self.config, weight_type, rounds_rows=rounds_rows)
        layout = PageLayout(
            self.config.layer_count, self.config.kv_head_count, self.config.head_dim, PAGE_SIZE
        )
        pages = PAGES * BATCH_MAX
        form = PoolFormat(pages, PAGE_SIZE, layout.page_bytes)
        self.file = PoolFile.create(folder / "bench.pool", Superblock(form, 1, layout.digest))
        self.pool = WorkerPool(self.file, layout)
        self.pool.pages.memory.view(torch.float32).normal_(0.0, 0.5)
        order = np.random.default_rng(0).permutation(pages).astype(np.uint32)
        self.tables = list(order.reshape(BATCH_MAX, PAGES))
        grant(self.file, order)
        self.decoder = TimedDecoder(self.config, self.weights)
        self.executor = ModelExecutor(self.decoder, layout)
        self.executor.use(self.pool)

    @property
    def matrices(self) -> list[PackedLinear]:
        layers = self.weights.layers
        mine = [m for layer in layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return [*mine, self.weights.head]

    def plan(self, case: Case, step: int, *, repeat_count: int = 0) -> StepPlan:
        rows = tuple(self._row(case, index, step) for index in range(case.batch))
        return StepPlan(step, rows, repeat_count=repeat_count)

    def run(self, plan: StepPlan) -> None:
        """Run ``RUN_STEPS`` steps in one call, the first of them ``plan``."""
        done = self.executor.run_on(plan, Ahead(_ANY_US))
        assert len(done.took_us) == RUN_STEPS, "no step of a run may be left out"

    def _row(self, case: Case, index: int, step: int) -> StepRow:
        random = np.random.default_rng([step, index])
        tokens: U32 = random.integers(0, self.config.vocab_tokens, CONTEXT_TOKENS).astype(np.uint32)
        key = SequenceKey(request=f"{index:032x}", attempt=1, choice=0)
        start = CONTEXT_TOKENS - case.tokens
        sample = Sample(key, Sampling(temperature=0.0, max_tokens=64), tokens, CONTEXT_TOKENS // 2)
        return StepRow(
            key=key, lease=index + 1, lease_slot=index + 1, granted_at=GRANTED_AT,
            page_table=self.tables[index], tokens=tokens[start:], start=start, samples=(sample,),
        )  # fmt: skip

    def read_bytes(self, case: Case) -> int:
        kv = 2 * self.config.kv_size * self.config.layer_count * CONTEXT_TOKENS * case.batch
        return sum(matrix.panels.nbytes for matrix in self.matrices) + 4 * kv

    def operations(self, case: Case) -> int:
        """Operations of a step, two for each multiply-add. A prompt has logits only for its last
        token."""
        *layers, head = (matrix.n * matrix.k for matrix in self.matrices)
        rows = case.batch * case.tokens
        seen = case.batch * sum(range(CONTEXT_TOKENS - case.tokens + 1, CONTEXT_TOKENS + 1))
        attention = 2 * self.config.query_size * self.config.layer_count * seen
        return 2 * (rows * sum(layers) + case.batch * head + attention)

    def stream(self, threads: int) -> None:
        for matrix in self.matrices:
            floats = matrix.panels.nbytes // 64 * 16
            native().pm_probe_stream(matrix.panels.data_ptr(), floats, threads)


def grant(file: PoolFile, pages: U32) -> None:
    """Write headers and lease words as a pager would, with one lease per sequence."""
    HeaderWriter(file.headers).write(
        pack_extents(pages), HeaderState.HELD,
        np.full(len(pages), GRANTED_AT, np.uint64).tobytes(), writer=0, root=0,
    )  # fmt: skip
    for lease in range(1, BATCH_MAX + 1):
        file.headers.set_lease_word(lease, lease)


def seconds(job: Callable[[], object]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def measure(bench: Bench, case: Case, threads: int, turns: int) -> dict[str, object]:
    square = torch.randn(SQUARE, SQUARE)
    logits = np.zeros((case.batch, bench.config.vocab_tokens), np.float32)
    rows = np.arange(case.batch)
    turns_s: list[dict[str, float]] = []
    for turn in range(turns + 1):
        plan = bench.plan(case, turn)
        samples = [row.samples[0] for row in plan.rows]
        jobs: dict[str, Callable[[], object]] = {
            "stream": lambda: bench.stream(threads),
            "arithmetic": lambda: native().pm_probe_arithmetic(PROBE_ROUNDS, threads),
            "matmul": lambda: square @ square,
            "sampling": lambda samples=samples: draw(logits, rows, samples),  # type: ignore[misc]
        }
        spent = {name: seconds(job) for name, job in jobs.items()}
        spent["step"] = seconds(lambda plan=plan: bench.executor.run(plan))  # type: ignore[misc]
        spent |= zip(PHASES, (bench.decoder.phase_us / 1e6).tolist(), strict=False)
        if case.tokens == 1:
            run = bench.plan(case, turn, repeat_count=RUN_STEPS - 1)
            spent["in_run"] = seconds(lambda run=run: bench.run(run)) / RUN_STEPS  # type: ignore[misc]
        if turn:  # the first warms up
            turns_s.append(spent)
    return report(bench, case, turns_s, threads)


def report(
    bench: Bench, case: Case, turns_s: list[dict[str, float]], threads: int
) -> dict[str, object]:
    reads = bench.read_bytes(case) / sum(matrix.panels.nbytes for matrix in bench.matrices)
    probed: int = 2 * native().pm_probe_arithmetic(PROBE_ROUNDS, threads)
    operations = bench.operations(case)

    def floor_of(spent: dict[str, float]) -> float:
        return max(reads * spent["stream"], operations / probed * spent["arithmetic"])

    best = {name: min(spent[name] for spent in turns_s) for name in turns_s[0]}
    floor, step_s = floor_of(best), best["step"]
    matmul_floor = max(reads * best["stream"], operations / (2 * SQUARE**3) * best["matmul"])
    quickest = min(turns_s, key=lambda spent: spent["step"])
    parts = [quickest[name] for name in PHASES[:3]] + [best["sampling"]]
    parts.append(step_s - sum(parts))
    found: dict[str, object] = {
        "case": case.name,
        "step_ms": round(step_s * 1e3, 2),
        "median_ms": round(statistics.median(spent["step"] for spent in turns_s) * 1e3, 2),
        "floor_ms": round(floor * 1e3, 2),
        "of_floor": round(floor / step_s, 3),
        "of_floor_median": round(
            statistics.median(floor_of(spent) / spent["step"] for spent in turns_s), 3
        ),
        "of_matmul_floor": round(matmul_floor / step_s, 3),
        "bandwidth_gb_s": round(bench.read_bytes(case) / reads / best["stream"] / 1e9, 2),
        "arithmetic_gflop_s": round(probed / best["arithmetic"] / 1e9, 1),
        "matmul_gflop_s": round(2 * SQUARE**3 / best["matmul"] / 1e9, 1),
        "breakdown_ms": {
            name: round(part * 1e3, 3) for name, part in zip(PHASES, parts, strict=True)
        },
        "python_share": round(parts[-1] / step_s, 3),
    }
    if "in_run" in best:
        found["in_run"] = {
            "step_ms": round(best["in_run"] * 1e3, 2),
            "of_floor": round(floor / best["in_run"], 3),
            "of_floor_median": round(
                statistics.median(floor_of(spent) / spent["in_run"] for spent in turns_s), 3
            ),
        }
    return found


def bench_model(
    name: str, weight_type: WeightType, threads: int, turns: int, *, rounds_rows: bool
) -> list[dict[str, Any]]:
    lines = []
    on = {
        **describe(), "threads": threads, "backend": identity(),
        "pinned": os.environ.get("GOMP_CPU_AFFINITY", ""),
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        bench = Bench(name, weight_type, Path(folder), rounds_rows=rounds_rows)
        for case in CASES:
            count = turns if case.tokens == 1 else max(3, turns // 4)
            found = measure(bench, case, threads, count)
            rows = "bfloat16" if rounds_rows else "float32"
            lines.append({"model": name, "weights": weight_type, "rows": rows, **found, "on": on})
            print(row_text(lines[-1]), flush=True)
        bench.executor.close()
        bench.file.remove()
    return lines


def rows_of(line: dict[str, Any]) -> str:
    return str(line.get("rows", "float32"))


def row_text(line: dict[str, Any]) -> str:
    parts: dict[str, float] = line["breakdown_ms"]
    share = " ".join(f"{name} {value:.2f}" for name, value in parts.items())
    aim = OF_FLOOR.get(line["case"])
    stands = f" ({of_aim(line['of_floor_median'], aim, at_least=True)})" if aim else ""
    run = line.get("in_run")
    in_run = f"  in a run {run['step_ms']} ms, {run['of_floor_median']:.2f}" if run else ""
    if run and aim:
        in_run += f" ({of_aim(run['of_floor_median'], aim, at_least=True)})"
    return (
        f"{line['model']} {line['weights']:<8} x {rows_of(line):<8} {line['case']:<12} "
        f"{line['step_ms']:>8} ms  "
        f"floor {line['floor_ms']:>8}  of floor {line['of_floor_median']:.2f}{stands} "
        f"(best {line['of_floor']:.2f})  "
        f"of matmul floor {line['of_matmul_floor']:.2f}{in_run}  | {share}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["S", "M", "L"], choices=["S", "M", "L"])
    parser.add_argument("--weights", nargs="+", choices=WEIGHT_TYPES)
    parser.add_argument("--round-rows", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("ops/bench/results/step.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kept = json.loads(options.out.read_text())["results"] if options.out.exists() else []
    rounded = options.round_rows
    rows = "bfloat16" if rounded else "float32"
    types = options.weights or (ROUNDING_TYPES if rounded else WEIGHT_TYPES)
    asked = [(name, weights, rows) for name in options.models for weights in types]
    lines = [line for line in kept if (line["model"], line["weights"], rows_of(line)) not in asked]
    for name, weights, _ in asked:
        lines += bench_model(name, weights, options.threads, options.turns, rounds_rows=rounded)
    report = {"benchmark": "step", "context_tokens": CONTEXT_TOKENS, "results": lines}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
