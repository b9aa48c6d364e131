"""The device, the sizes and the results of the items of ``ops.bench.gpu``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from pagemesh.kernels.batch import RaggedBatch
from pagemesh.kernels.kv_write.reference import kv_write
from pagemesh.kernels.layout import KvDtype
from pagemesh.kernels.ops import KvPool, PageLayout

PAGE_SIZE = 16
Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Limits:
    """The device's limits, measured in the same run: bytes copied a second, and operations a second
    of torch's products in bfloat16 and in float32 (by default without tf32)."""

    bandwidth_bytes: float
    flops_per_s: float
    float32_flops_per_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """``error``: the largest difference from the reference relative to its largest value, or the
    share of wrong elements if all should be equal. ``beside_ms``: the time of torch's own
    implementation, 0 if there is none."""

    error: float
    error_max: float
    time_ms: float
    bandwidth_fraction: float = 0.0
    flops_fraction: float = 0.0
    beside_ms: float = 0.0

    def line(self) -> dict[str, object]:
        """The result as a line of the report."""
        return {
            "ok": self.error <= self.error_max,
            "error": float(f"{self.error:.2g}"),
            "ms": round(self.time_ms, 4),
            "of_bandwidth": round(self.bandwidth_fraction, 3),
            "of_arithmetic": round(self.flops_fraction, 3),
            "torch_ms": round(self.beside_ms, 4),
        }


Item = Callable[[Limits], Result]


@dataclass(frozen=True, slots=True)
class Rig:
    """A GPU; or, with ``is_trial``, Triton's interpreter on a CPU, where sizes are small, float16
    stands for bfloat16 (which the interpreter gets wrong), and times mean nothing."""

    is_trial: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.is_trial else "cuda"

    def size(self, real: int, trial: int) -> int:
        """``real`` on a GPU, ``trial`` in a trial."""
        return trial if self.is_trial else real

    def half(self, dtype: torch.dtype = torch.bfloat16) -> torch.dtype:
        """The type that stands for ``dtype``."""
        return torch.float16 if self.is_trial and dtype is torch.bfloat16 else dtype

    def rows(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Random numbers."""
        return torch.randn(shape, device=self.device).to(self.half(dtype))

    def pool(
        self, dtype: KvDtype, pages: int, *, kv_heads: int, head_dim: int, layers: int = 1
    ) -> KvPool:
        """Pages of zeros."""
        own: KvDtype = "float16" if self.is_trial and dtype == "bfloat16" else dtype
        layout = PageLayout(layers, kv_heads, head_dim, PAGE_SIZE, own)
        size = pages * layout.page_bytes
        return KvPool(layout, torch.zeros(size, dtype=torch.uint8, device=self.device))

    def placed(self, batch: RaggedBatch) -> RaggedBatch:
        """``batch`` on the device."""
        return RaggedBatch(*(getattr(batch, field.name).to(self.device) for field in fields(batch)))

    def timed_ms(self, job: Callable[[], object], *, captured: bool = True) -> float:
        """Milliseconds that ``job`` takes on the device: the median over many replays of a graph,
        each with a cold cache. With ``captured`` False, for a job that waits for the host, the
        host's time counts as well. In a trial it runs once."""
        if self.is_trial:
            began_s = time.perf_counter()
            job()
            return 1e3 * (time.perf_counter() - began_s)
        from triton.testing import do_bench

        timed = job
        if captured:
            job()  # compiled, and libraries set up, before the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                job()
            timed = graph.replay
        return float(do_bench(timed, return_mode="median"))


def fill(rig: Rig, pool: KvPool, layer: int, *, value_size: float = 1.0) -> None:
    """Fill every slot with random K and V, so that a wrong page shows; V is scaled by
    ``value_size``."""
    at = pool.layout
    slots = torch.arange(pool.page_count * PAGE_SIZE, device=rig.device)
    for part in torch.split(slots, 1 << 16):
        k, v = (rig.rows(len(part), at.kv_heads, at.head_dim).float() for _ in range(2))
        kv_write(k, v * value_size, pool, layer, part)


def difference(got: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest expected value; infinite if there is a NaN."""
    most = float((got.float() - expected.float()).abs().max() / expected.float().abs().max())
    return most if most == most else float("inf")


def distance(got: Tensor, expected: Tensor) -> float:
    """The norm of the difference relative to that of the expected values: for codes, a few of which
    may be rounded either way. Infinite if there is a NaN."""
    length = float((got.float() - expected.float()).norm() / expected.float().norm())
    return math.inf if math.isnan(length) else length


def share_wrong(got: Tensor, expected: Tensor) -> float:
    """The share of elements that differ."""
    return float((got != expected).float().mean())
