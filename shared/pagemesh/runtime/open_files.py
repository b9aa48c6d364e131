"""How many files and connections a process may have open.

Login shells leave the limit that counts at 1,024, below a gateway's connections, though every
process may raise it up to another that is mostly far above. Beyond it connections are cut off
before anybody could say a word.
"""

from __future__ import annotations

import os
import resource

OPEN_FILES_MAX = 65_536
_SPARE_MIN = 8
_SPARE_PARTS = 32
"""Fewer left than this part of the limit, or than ``_SPARE_MIN``, are few."""
_OTHERS_MAX = 64
"""What a process has open, but for what it knows that it has many of: mostly some twenty."""


def open_files_allowed() -> int:
    """What ``allow_open_files`` comes to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    within = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    return OPEN_FILES_MAX if soft == resource.RLIM_INFINITY else max(soft, within)


def allow_open_files() -> None:
    """Let this process open what it may, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = open_files_allowed()
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def few_open_files_left(known_count: int) -> tuple[int, int] | None:
    """How many this process has open and how many it may, where that leaves few; else None.
    It has ``known_count`` for certain: counting them all takes time, and is left out where these
    are far from the limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = max(_SPARE_MIN, limit // _SPARE_PARTS)
    if limit == resource.RLIM_INFINITY or known_count + _OTHERS_MAX + spare < limit:
        return None
    try:
        count = len(os.listdir("/dev/fd")) - 1  # but for the folder itself
    except OSError:  # there is not even one for the folder
        count = limit
    return (count, limit) if count + spare >= limit else None
