"""The interface between steps and the memory and kernels they run on.

    HOST                  this process's own memory, a pool file's pages, the CPU's kernels
    cuda.device.GpuDevice memory of a GPU that processes share, Triton's kernels

What the forward pass needs of a device is up to the model's decoder. Here is everything else in a
step, and where the pages of a pool are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pagemesh.engine import sampler
from pagemesh.engine.worker.plan import Drawn, Sample, TokenScores
from pagemesh.kernels.ops import KvPool, page_copy
from pagemesh.wire.pool_format import IN_FILE

I64 = NDArray[np.int64]


class StepDevice(Protocol):
    """Runs everything in a step but its forward pass. One thread at a time."""

    @property
    def place(self) -> str:
        """Where the pages of a pool are: ``pool_format.IN_FILE``, or the name of a device."""
        ...

    def copy_pages(self, pool: KvPool, copies: Sequence[tuple[int, int]]) -> None:
        """See ``kernels.page_copy``. The copies need not be done when this returns, but are done
        before any kernel that is launched later."""
        ...

    def draw(self, logits: torch.Tensor, rows: I64, samples: Sequence[Sample]) -> tuple[Drawn, ...]:
        """See ``sampler.draw``; ``logits`` are on the device."""
        ...

    def score(self, logits: torch.Tensor, targets: I64, width: int) -> TokenScores:
        """See ``sampler.score``; ``logits`` are on the device."""
        ...

    def finish(self) -> None:
        """Wait until everything launched is done and visible to other processes. Only then may a
        step be reported, since its pages are committed or given away after that."""
        ...


class _Host:
    place = IN_FILE

    def copy_pages(self, pool: KvPool, copies: Sequence[tuple[int, int]]) -> None:
        page_copy(pool, copies)

    def draw(self, logits: torch.Tensor, rows: I64, samples: Sequence[Sample]) -> tuple[Drawn, ...]:
        return sampler.draw(logits.numpy(), rows, samples)

    def score(self, logits: torch.Tensor, targets: I64, width: int) -> TokenScores:
        return sampler.score(logits.numpy(), targets, width)

    def finish(self) -> None:
        """Nothing to wait for: every call above is done when it returns."""


HOST: StepDevice = _Host()
"""The CPU and its memory."""
