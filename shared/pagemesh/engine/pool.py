"""The host's page pool as a worker sees it: K and V to read and write, headers to check.

A worker writes the bytes of pages that it has the right to write, and nothing else in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from pagemesh.engine.memory_box import MemoryBox
from pagemesh.engine.worker.plan import StepRow
from pagemesh.kernels.native.headers import LeaseWatch
from pagemesh.kernels.native.pool_file import PoolFile
from pagemesh.kernels.native.populate import Populating
from pagemesh.kernels.ops import KvPool, PageLayout
from pagemesh.wire.errors import ConfigError, Gone, Stale
from pagemesh.wire.pager_messages import SessionOpened
from pagemesh.wire.pool_format import IN_FILE


class WorkerPool:
    """A mapped pool file, until ``close``; ``pages`` is for the kernels.

    Headers and lease words are always in the file, where every process can read them without a
    device. ``memory`` (uint8, whole pages) holds the pages if they are not in the file.
    """

    def __init__(
        self, file: PoolFile, layout: PageLayout, memory: torch.Tensor | None = None
    ) -> None:
        self._file = file
        in_memory = memory is None and file.is_memory
        self._populating = Populating(file.pages) if in_memory else None
        self.pages = KvPool(layout, file.pages if memory is None else memory)

    @classmethod
    def attach(
        cls, opened: SessionOpened, layout: PageLayout, box: MemoryBox | None = None
    ) -> WorkerPool:
        """Map the pool that a pager named; pages on a device come from ``box``.

        Raises ``Gone`` when there is no such pool (it may have ended with its pager) or its memory
        has not arrived, ``Stale`` when the file is not the pool that the pager named."""
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
            and found.place == (IN_FILE if box is None else box.place)
        )
        if not same:
            file.close()
            raise Stale(
                f"{opened.pool_path} is not the pool that the pager serves; ask the pager again"
            )
        if box is None:
            return cls(file, layout)
        try:
            memory = box.claim(found.incarnation, found.form.all_pages_bytes)
        except BaseException:
            file.close()
            raise
        return cls(file, layout, memory)

    @property
    def page_count(self) -> int:
        return self.pages.page_count

    def watch(self, slots: Sequence[int], leases: Sequence[int]) -> LeaseWatch:
        """A watch that tells, whenever asked, whether each lease stands by the word in its slot."""
        return self._file.headers.watch(slots, leases)

    def is_fresh(self, row: StepRow) -> bool:
        """Whether, by its header, every page of the row's table still belongs to its grant."""
        table = row.page_table
        return self._file.headers.fresh_count(table, row.granted_at) == len(table)

    def close(self) -> None:
        """Release the file; it is unmapped with the last view of its pages."""
        if self._populating is not None:
            self._populating.stop()
        self._file.close()
