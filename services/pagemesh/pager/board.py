"""A pager's settings, and what its service announces about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pagemesh.pager.leases.patience import IDLE_TICK_MS
from pagemesh.pager.limits import PagerLimits
from pagemesh.pager.storage.disk_file import DiskPlace
from pagemesh.wire.identity import secret_tag
from pagemesh.wire.presence import Announce


@dataclass(frozen=True, slots=True)
class PagerSettings:
    """Where and how this pager works."""

    host: str
    name: str
    incarnation: int
    folder: Path
    pool_bytes: int
    secret: bytes
    limits: PagerLimits
    kill_holders: bool
    eviction: str
    disk: DiskPlace | None = None
    """None: there is no disk tier."""


class CacheCallCount(Protocol):
    """Called for an answer to an operator; ``error`` is its code, or empty."""

    def __call__(self, subject: str, *, duration_us: int, error: str) -> None: ...


class PagerBoard:
    """What the service announces; kept across lives of the actor."""

    def __init__(self, settings: PagerSettings) -> None:
        self._settings = settings
        self._secret_tag = secret_tag(settings.secret)
        self._on_epoch: Callable[[], None] = lambda: None
        self._on_patience: Callable[[], None] = lambda: None
        self._on_cache_call: CacheCallCount | None = None
        self.draining = False
        self.epoch = self.free_pages = self.event_sequence = 0
        self.patience_ms = IDLE_TICK_MS
        """How long the pager can do without a tick."""

    def on_epoch(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when a new life has begun: workers wait for that."""
        self._on_epoch = callback

    def on_patience(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when ``patience_ms`` may have become less."""
        self._on_patience = callback

    def waits(self, patience_ms: int) -> None:
        """The pager can do without a tick for ``patience_ms``."""
        self.patience_ms = patience_ms
        self._on_patience()

    def on_cache_call(self, callback: CacheCallCount) -> None:
        """Call ``callback`` for each answer to an operator."""
        self._on_cache_call = callback

    def answered_operator(self, subject: str, duration_us: int, error: str) -> None:
        if self._on_cache_call is not None:
            self._on_cache_call(subject, duration_us=duration_us, error=error)

    def began(self, epoch: int) -> None:
        self.epoch = epoch
        self._on_epoch()

    def announce(self) -> Announce:
        settings = self._settings
        return Announce(
            role="pager",
            name=settings.name,
            incarnation=settings.incarnation,
            host=settings.host,
            state="draining" if self.draining else "ready",
            event_sequence=self.event_sequence,
            epoch=self.epoch,
            free_pages=self.free_pages,
            secret_tag=self._secret_tag,
        )
