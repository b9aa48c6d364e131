"""The host's page pool as a worker sees it: K and V to read and write, headers to check.

A worker writes page bytes it holds the write right to, and nothing else in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pagemesh.engine.worker.plan import StepRow
from pagemesh.kernels.native.headers import LeaseWatch
from pagemesh.kernels.native.pool_file import PoolFile
from pagemesh.kernels.ops import KvPool, PageLayout
from pagemesh.wire.errors import ConfigError, Gone, Stale
from pagemesh.wire.pager_messages import SessionOpened


class WorkerPool:
    """A mapped pool file. A context manager; ``pages`` is for the kernels."""

    def __init__(self, file: PoolFile, layout: PageLayout) -> None:
        self._file = file
        self.pages = KvPool(layout, file.pages)

    @classmethod
    def attach(cls, opened: SessionOpened, layout: PageLayout) -> WorkerPool:
        """Map the pool that a pager named. Raises ``Gone`` when there is no such pool (its
        pager may have ended with it), ``Stale`` when it is not the one the pager spoke of."""
        try:
            file = PoolFile.attach(Path(opened.pool_path))
        except ConfigError as error:
            raise Gone(str(error)) from None
        found = file.superblock
        same = (
            found.incarnation == opened.pool_incarnation
            and found.layout_digest == layout.digest
            and found.form.page_count == opened.page_count
            and found.form.page_bytes == layout.page_bytes
        )
        if not same:
            file.close()
            raise Stale(f"{opened.pool_path} is not the pool that the pager serves; ask it again")
        return cls(file, layout)

    @property
    def page_count(self) -> int:
        return self.pages.page_count

    def watch(self, slots: Sequence[int], leases: Sequence[int]) -> LeaseWatch:
        """Asks, as often as one likes, whether each lease stands by the word in its slot."""
        return self._file.headers.watch(slots, leases)

    def is_fresh(self, row: StepRow) -> bool:
        """Is every page of the row's table still one of its grant, by its header?"""
        table = row.page_table
        return self._file.headers.fresh_count(table, row.granted_at) == len(table)

    def close(self) -> None:
        """Let go of the file; the map goes with the last view of its pages."""
        self._file.close()
