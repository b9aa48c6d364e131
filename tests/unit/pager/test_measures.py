"""Gauges are read from the ledger now and then, however often somebody looks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.unit.pager.rig import LIMITS, ROOT, Rig, Worker, is_queued, key_of, order_of
from tests.unit.pager.steps import OTHER, cache

from pagemesh.pager import measures as pager_measures
from pagemesh.pager.books import Books
from pagemesh.pager.measures import Measures, own_bytes
from pagemesh.runtime import trace
from pagemesh.runtime.metrics import REGISTRY
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.pager_messages import Admit, Granted
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


def value(name: str, **labels: str) -> float:
    """What is shown; 0 for a counter that was never touched."""
    return REGISTRY.get_sample_value(f"pagemesh_pager_{name}", labels) or 0.0


def test_what_is_counted_as_it_goes_is_shown_once_however_often_the_ledger_is_read(
    rig: Rig, worker: Worker
) -> None:
    def shown() -> list[float]:
        return [
            value("in_flight_saved_tokens_total"),
            value("preemptions_total"),
            value("evicted_pages_total", tier="pool", reason="evicted"),
        ]

    measures, before = Measures(), shown()
    first = worker.granted(1, range(13))
    assert is_queued(worker.admit(2, range(13)))
    worker.committed(first, range(13))
    [second] = rig.taken(Granted)
    worker.release(first)
    worker.release(second)
    worker.granted(9, range(100, 164))  # the whole pool
    assert is_queued(worker.admit(3, range(4)))
    for _ in range(3):
        measures.sample(rig.core.books)
        assert [now - then for now, then in zip(shown(), before, strict=True)] == [12, 1, 3]


def test_pages_that_are_cached_and_idle_are_no_used_slots(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(8))
    worker.granted(2, range(100, 112))
    Measures().sample(rig.core.books)
    assert value("pages", state="idle") == 2
    assert value("used_slots") == 12


def test_empty_slots_are_read_at_the_same_moment_as_the_slots_in_use(
    rig: Rig, worker: Worker
) -> None:
    measures = Measures()
    lease = worker.granted(1, range(12))
    measures.sample(rig.core.books)
    worker.release(lease)
    for after_ms, shown in ((0, 12), (PERIOD_MS, 12), (PERIOD_MS, 12), (PERIOD_MS, 0)):
        rig.tick(after_ms)
        measures.sample(rig.core.books)
        wasted = sum(value("wasted_slots", kind=kind) for kind in ("internal", "reservation"))
        assert (wasted, value("used_slots")) == (shown, shown)


def test_who_waits_for_room_and_who_waits_for_its_tenant_are_shown_apart(
    rig: Rig, worker: Worker
) -> None:
    half = CacheTerms(tenant="alice", pages_max=8)
    worker.granted(1, range(32), root=OTHER, terms=half)
    worker.granted(2, range(100, 132))
    assert is_queued(worker.admit(3, range(200, 204), root=OTHER, terms=half))
    for number in (4, 5):
        assert is_queued(worker.admit(number, range(100 * number, 100 * number + 4)))
    Measures().sample(rig.core.books)
    assert (value("waiters"), value("quota_waiters")) == (2, 1)


def test_a_session_that_has_ended_and_owes_pages_still_is_not_shown_as_open(
    rig: Rig, worker: Worker
) -> None:
    worker.granted(1, range(4))
    rig.tick(LIMITS.session_ttl_ms)
    Worker(rig, "other", 2)
    assert len(rig.core.books.sessions) == 2
    Measures().sample(rig.core.books)
    assert value("sessions") == 1


def test_the_span_of_a_request_tells_what_that_one_evicted(
    rig: Rig, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []

    def record(*_: object, attributes: Mapping[str, object], **__: object) -> None:
        told.append(attributes["pagemesh.evicted.pages"])

    monkeypatch.setattr(pager_measures, "record_span", record)
    measures, books = Measures(), rig.core.books
    asked = Admit(
        key=key_of(9), order=order_of(9), worker="w", incarnation=1, epoch=1, root=ROOT,
        tokens=pack([9]), reserve_tokens=1, deadline_ms=1_000,
    )  # fmt: skip
    cache(worker, 1, range(32))
    for number in (2, 3):
        ids = range(100 * number, 100 * number + 64)
        measures.before(books)
        lease = worker.granted(number, ids)
        measures.answered(asked, lease, trace.new_trace(), 1, 2, books)
        worker.release(lease, ids[:16])
    assert told == [8, 4]


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
