"""Gauges are read from the ledger now and then, however often somebody looks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.pager.rig import ROOT, Rig, Worker, key_of, order_of

from pagemesh.pager.books import Books
from pagemesh.pager.measures import Measures, own_bytes
from pagemesh.runtime.metrics import REGISTRY
from pagemesh.wire.pager_messages import Admit, Granted, Waterfall
from pagemesh.wire.tokens import pack

PERIOD_MS = 400


class Noted(Measures):
    """Notes when it reads the ledger."""

    def __init__(self) -> None:
        super().__init__()
        self.read_ms: list[int] = []

    def sample(self, books: Books) -> None:
        self.read_ms.append(books.now_ms)
        super().sample(books)


@pytest.mark.parametrize("tick_ms", [1, 10, 150, PERIOD_MS, 1_000])
def test_the_ledger_is_read_at_the_first_look_and_then_at_most_every_400_ms(
    rig: Rig, tick_ms: int
) -> None:
    measures = Noted()
    rig.tick()
    for _ in range(40 * PERIOD_MS // tick_ms):
        measures.look(rig.core.books)
        measures.look(rig.core.books)
        rig.tick(tick_ms)
    ticks = -(-PERIOD_MS // tick_ms)
    gaps = {later - at for at, later in zip(measures.read_ms, measures.read_ms[1:], strict=False)}
    assert measures.read_ms[0] == 1_000 and gaps == {ticks * tick_ms}


def test_a_look_shows_what_came_since_the_last_reading_once_its_time_has_come(
    rig: Rig, worker: Worker
) -> None:
    measures = Measures()
    measures.look(rig.core.books)
    worker.granted(1, range(10))
    for after_ms, shown in ((0, 0), (PERIOD_MS - 1, 0), (1, 1)):
        rig.tick(after_ms)
        measures.look(rig.core.books)
        assert REGISTRY.get_sample_value("pagemesh_pager_leases") == shown


def test_what_a_prompt_finds_when_it_is_admitted_again_counts_apart(
    rig: Rig, worker: Worker
) -> None:
    measures = Measures()

    def counted(again: bool) -> list[float]:
        request = Admit(
            key=key_of(9), order=order_of(9), worker=worker.name, incarnation=1, epoch=1, root=ROOT,
            tokens=pack(range(9)), reserve_tokens=9, again=again, deadline_ms=1_000,
        )  # fmt: skip
        answer = Granted(
            key=request.key, lease=1, lease_slot=0, granted_at=1, extents=b"", cached_tokens=8,
            waterfall=Waterfall(delivered_tokens=8, lost={"evicted": 4}),
        )  # fmt: skip
        fates = ("delivered", "lost_evicted", "admitted_again")
        name = "pagemesh_pager_prompt_tokens_total"
        before = [REGISTRY.get_sample_value(name, {"fate": fate}) or 0.0 for fate in fates]
        measures.answered(request, answer, None, 0, 0, rig.core.books)
        after = [REGISTRY.get_sample_value(name, {"fate": fate}) or 0.0 for fate in fates]
        return [late - early for early, late in zip(before, after, strict=True)]

    assert counted(again=False) == [8, 4, 0]
    assert counted(again=True) == [0, 0, 8]


def test_its_own_memory_is_what_no_file_is_mapped_to(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmRSS:\t  900 kB\nRssAnon:\t  123 kB\nRssFile:\t 777 kB\n")
    assert own_bytes(tmp_path / "status") == 123 * 1024
    assert own_bytes(tmp_path / "none") == 0 < own_bytes()
