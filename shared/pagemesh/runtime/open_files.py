"""How many files and connections a process may have open.

Login shells leave the limit that counts at 1,024, below a gateway's connections, though every
process may raise it up to another that is mostly far above. Beyond it connections are cut off
before anybody could say a word.
"""

from __future__ import annotations

import resource

OPEN_FILES_MAX = 65_536


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
