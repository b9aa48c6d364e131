"""The beams of one request: their tokens (``beam_search``) and their pages (``beam_pages``).

A group lives under one lease. Under another lease it starts again from its prompt: nothing was
delivered, and what it had computed went with the pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagemesh.engine.worker.beam_pages import BeamPages
from pagemesh.engine.worker.beam_search import BeamSearch
from pagemesh.engine.worker.lease import Lease
from pagemesh.engine.worker.plan import RowResult, Sample, StepRow
from pagemesh.wire.tokens import U32
from pagemesh.wire.work_messages import Hypothesis, Sampling


class BeamGroup:
    """``prompt``: uint32 [tokens], at least one."""

    def __init__(self, sampling: Sampling, prompt: U32, page_size: int) -> None:
        assert sampling.beams is not None
        self._sampling = sampling
        self._width = sampling.beams.width
        self._prompt = prompt
        self._page_size = page_size
        self._lease: Lease | None = None
        self._search = BeamSearch(sampling)
        self._pages: BeamPages | None = None
        self.pages_max = sampling.beams.pages_max(len(prompt), sampling.max_tokens, page_size)
        self.hypotheses: list[Hypothesis] | None = None
        """The answer, once there is one."""

    @property
    def is_fresh(self) -> bool:
        """The step that computes the last prompt token has not ended."""
        return self._search.length == 0

    @property
    def length(self) -> int:
        """Slots of each beam that are filled."""
        return len(self._prompt) - 1 + self._search.length

    @property
    def row_count(self) -> int:
        return len(self._search.beams)

    @property
    def saved_pages(self) -> int:
        """Pages that beams saved by sharing, at the peak so far."""
        return self._pages.saved_count_max if self._pages is not None else 0

    def wanted_slots(self, lease: Lease | None) -> int:
        """Slots that ``lease`` should have; None: a lease still to be asked for."""
        if self._pages is None or self._lease is not lease:
            shared = (len(self._prompt) - 1) // self._page_size
            wanted = shared + 2 * self._width
        else:
            wanted = self._pages.wanted_count(self.length, self._width)
        pages = max(min(wanted, self.pages_max), -(-len(self._prompt) // self._page_size))
        return pages * self._page_size

    def ready(self, lease: Lease) -> bool:
        """Whether the next step can be computed under ``lease``, in which the slots of all prompt
        tokens but the last are filled; False: it needs more pages."""
        if self._lease is not lease or self._pages is None:
            self._lease, self._search = lease, BeamSearch(self._sampling)
            self._pages = BeamPages(lease.table, len(self._prompt), self._page_size)
        self._pages.learn(lease.table)
        return self._pages.prepare(self.length)

    def rows(self, lease: Lease) -> tuple[list[StepRow], list[tuple[int, int]]]:
        """A row for each beam, and the pages to copy first (source, target); call ``ready``
        before."""
        pages, search = self._pages, self._search
        assert pages is not None and self._lease is lease
        rows = []
        for index, beam in enumerate(search.beams):
            token = self._prompt[-1] if beam.last is None else beam.last.token
            sample = Sample(
                lease.key,
                self._sampling,
                self._prompt,
                len(self._prompt),
                candidate_count=search.candidate_count,
                beam_length=search.length,
            )
            rows.append(
                StepRow(
                    key=lease.key,
                    lease=lease.lease,
                    lease_slot=lease.slot,
                    granted_at=lease.granted_at,
                    page_table=pages.table(index),
                    tokens=np.array([token], np.dtype("<u4")),
                    start=self.length,
                    samples=(sample,),
                )
            )
        return rows, pages.take_copies()

    def take(self, outcomes: Sequence[RowResult]) -> None:
        """Take the results of the rows, none of them poisoned or revoked."""
        assert self._pages is not None
        parents = self._search.advance([outcome.drawn[0] for outcome in outcomes])
        self._pages.fork(parents)
        if self._search.ended:
            self.hypotheses = self._search.hypotheses()

    def check(self) -> None:
        if self._pages is not None:
            self._pages.check()
