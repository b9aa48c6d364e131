"""Pages that nobody has are told with who wrote them last, as their headers say."""

from __future__ import annotations

from pathlib import Path

import msgspec
from tests.unit.pager.rig import Rig, Worker, key_of

from pagemesh.pager import last_writers
from pagemesh.pager.events import WriteHeaders
from pagemesh.pager.pages.runs import Run
from pagemesh.pager.storage.pool_store import PoolStore
from pagemesh.pager.tiers.load import PAGER
from pagemesh.wire.messages import Ok
from pagemesh.wire.pager_messages import PoolSpec
from pagemesh.wire.pager_reports import LedgerFault, PagerReport
from pagemesh.wire.pool_format import EPOCH_SHIFT, HeaderState

SPEC = PoolSpec(layout_digest=b"d" * 32, page_size=4, page_bytes=4_096)
GONE = 0xABC


def test_faults_that_are_no_leases_name_the_last_writers_of_their_pages(
    tmp_path: Path, rig: Rig
) -> None:
    Worker(rig, "w", 5)
    store = PoolStore.create(tmp_path, "host", SPEC, 8 * 4_096)
    first = store.facts.epoch << EPOCH_SHIFT
    for page, writer in enumerate((5, 5, GONE, PAGER)):
        store.perform(
            WriteHeaders(
                Run(page, page + 1), HeaderState.HELD, Run(first + page, first + page + 1),
                writer, 0,
            )
        )  # fmt: skip
    nobodys = LedgerFault(what="lost", page_count=4, pages=[0, 1, 2, 3])
    leased = LedgerFault(what="twice", page_count=1, pages=[2], lease=7, key=key_of(1), owner="v")
    count = LedgerFault(what="a count")
    report = msgspec.structs.replace(rig.core.report(), faults=[nobodys, leased, count])
    told = last_writers.named(report, store, rig.core.books)
    assert isinstance(told, PagerReport)
    assert [fault.owner for fault in told.faults] == ["w, incarnation abc, the pager", "v", ""]
    store.file.remove()


def test_what_has_no_fault_goes_out_as_it_is(tmp_path: Path, rig: Rig) -> None:
    store = PoolStore.create(tmp_path, "host", SPEC, 8 * 4_096)
    for message in (rig.core.report(), Ok()):
        assert last_writers.named(message, store, rig.core.books) is message
    store.file.remove()
