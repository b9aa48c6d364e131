"""What operations work in: it is bounded, and where there is none the process ends with a line."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

_DRAWS = """
import resource
import torch
from pagemesh.kernels.softmax_draw import Limits, softmax_draw

x = torch.zeros(1, 1 << 23)
row, one, uniform = torch.zeros(1, dtype=torch.int64), torch.ones(1), torch.zeros(1).double()
limits = Limits(torch.zeros(1), row + 3, uniform + 1)
softmax_draw(x[:, :99], row, one, uniform, limits)
used_bytes = resource.getpagesize() * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (1 << 24), resource.RLIM_INFINITY))
softmax_draw(x, row, one, uniform, limits)
"""


def test_a_kernel_without_memory_ends_the_process_with_a_line_that_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _DRAWS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert done.stderr.startswith("pagemesh: no memory for "), done.stderr
    assert len(done.stderr.splitlines()) == 1


_ATTENDS = """
import resource
import sys
import numpy as np
import torch
from pagemesh.kernels.ops import KvPool, PageLayout, paged_attention, ragged_batch

# Many queries of one wide heads have much state for little arithmetic. Tiles and rows of a tile
# begin and end in other spans of 512.
spans, window, rows, heads, page_size = 3000, int(sys.argv[1]), 33, 16, 64
pool = KvPool.allocate(PageLayout(1, 1, 1, page_size), (spans + 1) * 512 // page_size)
pool.memory.view(torch.float32).normal_()
table = np.random.default_rng(0).permutation(pool.page_count).astype(np.uint32)
q = torch.randn(rows, heads, 1)

def attend(last_span: int) -> torch.Tensor:
    batch = ragged_batch([table], [512 * last_span - 28], [rows], page_size)
    return paged_attention(q, pool, 0, batch, 0.2, window_tokens=window)

torch.set_num_threads(1)
expected = attend(spans)
torch.set_num_threads(9)
attend(10)
used_bytes = resource.getpagesize() * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (96 << 20), resource.RLIM_INFINITY))
assert torch.equal(attend(spans), expected)
"""


@pytest.mark.parametrize("window", [2**31, 512 * 2999], ids=["no window", "a window"])
def test_attention_over_a_long_past_on_many_threads_keeps_to_its_memory_and_to_its_bits(
    window: int,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ATTENDS, str(window)],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
