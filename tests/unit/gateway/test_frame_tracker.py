"""Messages of frames that were lost on the way."""

from __future__ import annotations

from tests.unit.gateway.support import frame

from pagemesh.gateway.calls.events import Worker
from pagemesh.gateway.calls.frames import FrameTracker
from pagemesh.wire.work_messages import Frame, Frames


def frames(counter: int, *, empty: bool = False, incarnation: int = 1) -> Frames:
    inside: list[Frame] = [] if empty else [frame(0, [1])]
    return Frames(
        worker="w", incarnation=incarnation, gateway_incarnation=1, counter=counter, frames=inside
    )


def arrived(tracker: FrameTracker, message: Frames) -> int:
    return tracker.arrived(Worker(message.worker, message.incarnation), message)


def test_a_lost_message_shows_at_the_next_one() -> None:
    tracker = FrameTracker()
    counts = [arrived(tracker, frames(counter)) for counter in (1, 2, 5, 5, 6)]
    assert counts == [0, 0, 2, 0, 0]


def test_a_lost_last_message_shows_at_an_idle_heartbeat() -> None:
    tracker = FrameTracker()
    arrived(tracker, frames(1))
    assert arrived(tracker, frames(1, empty=True)) == 0
    assert arrived(tracker, frames(2, empty=True)) == 1


def test_each_life_of_a_worker_is_counted_by_itself() -> None:
    tracker = FrameTracker(workers_max=2)
    assert arrived(tracker, frames(3, incarnation=1)) == 2
    assert arrived(tracker, frames(1, incarnation=2)) == 0
    assert arrived(tracker, frames(1, incarnation=3)) == 0
    tracker.check()


def test_counting_anew_is_no_loss() -> None:
    tracker = FrameTracker()
    arrived(tracker, frames(500))
    assert arrived(tracker, frames(1)) == 0
    assert arrived(tracker, frames(2)) == 0


def test_what_is_lost_while_it_is_counted_anew_shows_too() -> None:
    tracker = FrameTracker()
    arrived(tracker, frames(500))
    assert [arrived(tracker, frames(counter)) for counter in (3, 4, 6)] == [2, 0, 1]
    assert arrived(tracker, frames(1, empty=True)) == 1, "its first, and none has come since"
