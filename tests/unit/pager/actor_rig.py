"""A pager's actor on a fake bus that records its answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from tests.unit.pager.rig import LAYOUT

from pagemesh.pager.actor import PagerActor
from pagemesh.pager.board import PagerBoard, PagerSettings
from pagemesh.pager.limits import PagerLimits
from pagemesh.pager.storage.pool_memory import PoolMemory
from pagemesh.runtime.bus import Bus, BusState
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.runtime.settings import BusConfig
from pagemesh.wire.pager_messages import PoolSpec

HOST = "host"
SPEC = PoolSpec(layout_digest=LAYOUT, page_size=4, page_bytes=1 << 12)
POOL_BYTES = 64 * SPEC.page_bytes


class Answers:
    """A fake bus that records what is sent to the subject ``answers``, as bytes."""

    config, state = BusConfig(), BusState.CONNECTED

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def publish(self, subject: str, data: bytes, **_: Any) -> None:
        if subject == "answers":
            self.sent.append(data)


def made_actor(folder: Path, answers: Answers) -> PagerActor:
    """An actor with its files in ``folder``; it has no pool yet."""
    settings = PagerSettings(
        HOST, "pager", 1, folder, POOL_BYTES, b"secret", PagerLimits(), False, "lru"
    )
    return PagerActor(
        settings, cast(Bus, answers), MonotonicClock(), PagerBoard(settings), lambda _due: True,
        PoolMemory(folder),
    )  # fmt: skip
