"""Python's objects on huge pages of 2 MiB each, which most systems give only to those who ask.

A hop of a request runs code that last ran a long time ago by a processor's standards. Each 4 KiB
page that it touches then has to be looked up in page tables in memory, in a virtual machine in
two at once. What a service has loaded lies on very many such pages, or on a few huge ones.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

HUGE_BYTES = 2 << 20
HUGE_PAGE_COUNT_MAX = 128
"""A quarter of a gigabyte: more than any service has in Python objects once it has loaded."""
_OBJECTS_MIN = 256
"""A huge page with fewer objects mostly holds something else."""
_ADVISE, _COLLAPSE = 14, 25
"""``MADV_HUGEPAGE`` and, from Linux 6.1 on, ``MADV_COLLAPSE``, which does it at once."""
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def gather(objects: Iterable[object], *, setting: Path = SETTING) -> int:
    """Move the memory around ``objects`` to huge pages as far as possible; returns how many. Each
    takes some milliseconds, and extra memory where it was used only in part. ``setting``: the
    file in which the system says whether processes may have huge pages."""
    if not _allowed(setting):
        return 0
    counts = Counter(id(one) // HUGE_BYTES for one in objects)
    most = counts.most_common(HUGE_PAGE_COUNT_MAX)
    dense = [page for page, count in most if count >= _OBJECTS_MIN]
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    # The first fails where part of the range is not mapped, or is memory of another kind.
    return sum(
        advise(page * HUGE_BYTES, HUGE_BYTES, _ADVISE) == 0
        and advise(page * HUGE_BYTES, HUGE_BYTES, _COLLAPSE) == 0
        for page in dense
    )


def _allowed(setting: Path) -> bool:
    try:
        return "[never]" not in setting.read_text()
    except OSError:
        return False
