"""Ledger numbers one by one, as code that stores headers needs them."""

from __future__ import annotations

import numpy as np

from pagemesh.pager.pages.column import Numbers


def each_of(numbers: Numbers) -> list[int]:
    return np.frombuffer(numbers, np.uint64).tolist() if isinstance(numbers, bytes) else [*numbers]
