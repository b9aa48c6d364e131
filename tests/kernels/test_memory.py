"""An operation that finds no memory for what it works in ends the process with a line."""

from __future__ import annotations

import signal
import subprocess
import sys

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
