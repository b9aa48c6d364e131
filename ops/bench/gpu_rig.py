"""Where the items of ``ops.bench.gpu`` run, how large they are, and what comes of them."""

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
    """The device's own, measured in the same run: bytes moved and operations done a second, in
    bfloat16 and in float32 by torch's products (which take no tf32 by themselves)."""

    bandwidth_bytes: float
    flops_per_s: float
    float32_flops_per_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """``error``: largest difference from the reference over its largest value, or the share that
    is wrong where all should be equal. ``beside_ms``: torch's own way to the same, 0 where there
    is none."""

    error: float
    error_max: float
    time_ms: float
    bandwidth_fraction: float = 0.0
    flops_fraction: float = 0.0
    beside_ms: float = 0.0

    def line(self) -> dict[str, object]:
        """For the report."""
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
        """How many of something."""
        return trial if self.is_trial else real

    def half(self, dtype: torch.dtype = torch.bfloat16) -> torch.dtype:
        """What stands for ``dtype``."""
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
        """Milliseconds of ``job`` that the device takes: the median of many replays of one graph,
        each with nothing of it in the cache. With ``captured`` False, for what waits for the host,
        the host's share counts as well. Once in a trial."""
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
    """K and V of every slot, so that a wrong page shows; V ``value_size`` times as large as K."""
    at = pool.layout
    slots = torch.arange(pool.page_count * PAGE_SIZE, device=rig.device)
    for part in torch.split(slots, 1 << 16):
        k, v = (rig.rows(len(part), at.kv_heads, at.head_dim).float() for _ in range(2))
        kv_write(k, v * value_size, pool, layer, part)


def difference(got: Tensor, expected: Tensor) -> float:
    """The largest, over the largest that was expected; infinite where a number is none."""
    most = float((got.float() - expected.float()).abs().max() / expected.float().abs().max())
    return most if most == most else float("inf")


def distance(got: Tensor, expected: Tensor) -> float:
    """The length of the difference over that of what was expected: for codes, of which a few may
    fall either way. Infinite where one is NaN."""
    length = float((got.float() - expected.float()).norm() / expected.float().norm())
    return math.inf if math.isnan(length) else length


def share_wrong(got: Tensor, expected: Tensor) -> float:
    """Of elements that should be equal."""
    return float((got != expected).float().mean())
