"""Gauges are read from the ledger now and then, however often somebody looks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.pager.rig import Rig, Worker, is_queued

from pagemesh.pager.books import Books
from pagemesh.pager.measures import Measures, own_bytes
from pagemesh.runtime.metrics import REGISTRY
from pagemesh.wire.pager_messages import Granted

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


class Fates:
    """What became of tokens of prompts, as it is counted since the last look."""

    def __init__(self, rig: Rig) -> None:
        self._rig, self._measures = rig, Measures()
        self._before = dict[str, float]()
        self.new()

    def new(self) -> dict[str, float]:
        self._measures.sample(self._rig.core.books)
        [metric] = [one for one in REGISTRY.collect() if one.name == "pagemesh_pager_prompt_tokens"]
        total = {s.labels["fate"]: s.value for s in metric.samples if s.name.endswith("_total")}
        found = {fate: count - self._before.get(fate, 0) for fate, count in total.items()}
        self._before = total
        return {fate: count for fate, count in found.items() if count}


@pytest.fixture
def fates(rig: Rig) -> Fates:
    return Fates(rig)


def test_what_is_granted_to_those_who_waited_for_a_prompt_in_flight_counts(
    rig: Rig, worker: Worker, fates: Fates
) -> None:
    prompt = range(13)
    first = worker.granted(1, prompt)
    queued = [worker.admit(number, prompt) for number in range(2, 17)]
    assert all(is_queued(answer) for answer in queued) and not fates.new()
    worker.committed(first, prompt)
    granted = rig.taken(Granted)
    assert len(granted) == 12, "there is no room for more"
    assert fates.new() == {"delivered": 12 * 12}
    for one in granted:
        worker.release(one)
    assert len(rig.taken(Granted)) == 3
    assert fates.new() == {"delivered": 3 * 12}


def test_a_prompt_counts_once_however_often_its_worker_asks(worker: Worker, fates: Fates) -> None:
    worker.release(worker.granted(1, range(10)), range(10))
    granted = worker.granted(2, range(10))
    assert fates.new() == {"delivered": 8}
    assert worker.granted(2, range(10)) == granted, "its answer was lost"
    assert not fates.new()


def test_what_a_prompt_lost_counts_by_reason(worker: Worker, fates: Fates) -> None:
    worker.release(worker.granted(1, range(16)), range(16))
    worker.release(worker.granted(2, range(100, 156)), range(100, 156))
    worker.granted(3, [*range(100, 106), 0, 0])
    worker.granted(4, range(17))
    assert fates.new() == {"delivered": 8, "lost_partial_page": 2, "lost_evicted": 12}


def test_what_a_prompt_finds_when_it_is_admitted_again_counts_apart(
    worker: Worker, fates: Fates
) -> None:
    worker.release(worker.granted(1, range(10)), range(10))
    worker.granted(1, [*range(11), 0], attempt=2)
    assert fates.new() == {"admitted_again": 8}


def test_its_own_memory_is_what_no_file_is_mapped_to(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmRSS:\t  900 kB\nRssAnon:\t  123 kB\nRssFile:\t 777 kB\n")
    assert own_bytes(tmp_path / "status") == 123 * 1024
    assert own_bytes(tmp_path / "none") == 0 < own_bytes()
