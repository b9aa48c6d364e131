"""Who holds the memory of pools on a device: that of the host stands for a GPU's."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pagemesh.engine.cuda.device import SharedMaker
from pagemesh.wire.errors import NoCapacity

_NAME = "memfd:pagemesh-pool"


def memories(pid: int = 0) -> set[int]:
    """Those of which a process (0: this one) has a descriptor or a map, by inode."""
    process = Path(f"/proc/{pid or os.getpid()}")
    found = set()
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            if _NAME in str(descriptor.readlink()):
                found.add(descriptor.stat().st_ino)
    lines = (process / "maps").read_text().splitlines()
    return found | {int(line.split()[4]) for line in lines if _NAME in line}


class SmallCard(SharedMaker):
    """Has room for one pool, and none while anything in this process holds one made later than
    the card itself."""

    def __init__(self) -> None:
        self._others = memories()

    def make(self, size_bytes: int) -> int:
        if memories() - self._others:
            raise NoCapacity("the card is full")
        return super().make(size_bytes)
