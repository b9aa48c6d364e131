"""Python's objects on huge pages, 2 MiB each, which Linux gives to nobody who does not ask.

A hop of a request runs code that last ran a long time ago, as a processor sees it. Each page of
4 KiB that it touches then has to be looked up in tables in memory, in a virtual machine in two
at once; what a service has loaded lies on very many of these, or on a few huge ones.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

HUGE_BYTES = 2 << 20
HUGE_PAGE_COUNT_MAX = 128
"""A quarter of a gigabyte: no service has as much of Python's objects when it has loaded."""
_OBJECTS_MIN = 256
"""Where fewer objects lie, the memory is something else's."""
_ADVISE, _COLLAPSE = 14, 25
"""``MADV_HUGEPAGE`` and, from Linux 6.1 on, ``MADV_COLLAPSE``, which does it at once."""
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def gather(objects: Iterable[object], *, setting: Path = SETTING) -> int:
    """Have the memory around ``objects`` on huge pages as far as that is possible; gives their
    number. It takes some milliseconds for each, and room where a page was used in part.
    ``setting``: where the system says whether it has any for processes."""
    if not _allowed(setting):
        return 0
    counts = Counter(id(one) // HUGE_BYTES for one in objects)
    most = counts.most_common(HUGE_PAGE_COUNT_MAX)
    dense = [page for page, count in most if count >= _OBJECTS_MIN]
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    # Where the first fails, part of the page is nobody's memory or another kind's.
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
