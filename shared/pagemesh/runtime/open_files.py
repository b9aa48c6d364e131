"""How many files and connections a process may have open.

Login shells leave the soft limit at 1,024, fewer than a gateway's connections, though every
process may raise it to the hard limit, which is usually far above. Beyond it connections are
closed before anything can be sent.
"""

from __future__ import annotations

import os
import resource

OPEN_FILES_MAX = 65_536
_SPARE_MIN = 8
_SPARE_PARTS = 32
"""Few are left: at most the limit divided by this, or at most ``_SPARE_MIN``."""
_OTHERS_MAX = 64
"""Files that a process has open besides those it counts itself: usually some twenty."""


def open_files_allowed() -> int:
    """The limit that ``allow_open_files`` sets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    within = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    return OPEN_FILES_MAX if soft == resource.RLIM_INFINITY else max(soft, within)


def allow_open_files() -> None:
    """Raise this process's limit as far as it may, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = open_files_allowed()
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def few_open_files_left(known_count: int) -> tuple[int, int] | None:
    """How many files this process has open and how many it may, if few are left; otherwise None.
    It certainly has ``known_count`` open: counting them all takes time, and is skipped while that
    number is far below the limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = max(_SPARE_MIN, limit // _SPARE_PARTS)
    if limit == resource.RLIM_INFINITY or known_count + _OTHERS_MAX + spare < limit:
        return None
    try:
        count = len(os.listdir("/dev/fd")) - 1  # without the folder itself
    except OSError:  # not even the folder can be opened
        count = limit
    return (count, limit) if count + spare >= limit else None
