"""Finds who holds the memory of pools on a device, for which host memory stands in."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pagemesh.engine.cuda.device import SharedMaker
from pagemesh.wire.errors import NoCapacity

_NAME = "memfd:pagemesh-pool"


def memories(pid: int = 0) -> set[int]:
    """Inodes of the memories of which process ``pid`` (0: this one) has a descriptor or a
    mapping."""
    process = Path(f"/proc/{pid or os.getpid()}")
    found = set()
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            if _NAME in str(descriptor.readlink()):
                found.add(descriptor.stat().st_ino)
    lines = (process / "maps").read_text().splitlines()
    return found | {int(line.split()[4]) for line in lines if _NAME in line}


class SmallCard(SharedMaker):
    """A card with room for one pool: it is full while anything in this process holds a memory made
    after the card itself."""

    def __init__(self) -> None:
        self._others = memories()

    def make(self, size_bytes: int) -> int:
        if memories() - self._others:
            raise NoCapacity("the card is full")
        return super().make(size_bytes)
