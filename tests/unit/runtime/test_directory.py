"""The directory: who is there, decided from announcements alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemesh.runtime.directory import Changed, Directory, Doubled, Joined, Lost
from pagemesh.wire.presence import Announce, Load, Role, State


def announce(
    name: str = "w", incarnation: int = 1, state: State = "ready", role: Role = "decode",
    running: int = 0,
) -> Announce:  # fmt: skip
    return Announce(
        role=role, name=name, incarnation=incarnation, host="h", state=state,
        load=Load(running_count=running),
    )  # fmt: skip


def test_a_first_announcement_joins_and_a_repeat_is_no_news() -> None:
    directory = Directory(lost_after_ms=100)
    assert directory.hear(announce(), 0) == [Joined(announce())]
    assert directory.hear(announce(), 10) == []
    assert directory.hear(announce(running=3), 20) == [Changed(announce(running=3))]
    assert directory.find("decode", "w") == announce(running=3)
    directory.check()


def test_what_somebody_says_who_was_doubted_is_news_once() -> None:
    directory = Directory(lost_after_ms=100)
    directory.hear(announce(), 0)
    directory.doubt("w", announce().incarnation + 1)
    assert directory.hear(announce(), 10) == []
    directory.doubt("w", announce().incarnation)
    assert directory.hear(announce(), 20) == [Changed(announce())]
    assert directory.hear(announce(), 30) == []


def test_silence_is_loss_after_the_limit_and_not_at_it() -> None:
    directory = Directory(lost_after_ms=100)
    directory.hear(announce(), 0)
    assert directory.expire(100) == []
    assert directory.expire(101) == [Lost(announce(), "silent")]
    assert directory.expire(102) == []


def test_who_lives_on_beside_a_successor_is_told_of_now_and_then() -> None:
    directory = Directory(lost_after_ms=100)
    one, other = announce(incarnation=1), announce(incarnation=2)
    directory.hear(one, 0)
    directory.hear(other, 10)
    assert directory.hear(one, 110) == []  # it may be late
    assert directory.hear(announce(incarnation=1, state="draining"), 111) == []
    assert directory.hear(announce(incarnation=3), 111) != []
    assert directory.hear(one, 211) == []
    last = announce(incarnation=3)
    assert directory.hear(other, 212) == [Doubled(last, other)]
    assert directory.hear(one, 213) == []
    assert directory.hear(one, 60_213) == [Doubled(last, one)]
    directory.check()


@pytest.mark.parametrize("ends", ["leaves", "falls silent"])
def test_who_lived_on_beside_a_successor_is_back_once_that_one_is_gone(ends: str) -> None:
    directory = Directory(lost_after_ms=100)
    one, other = announce(incarnation=1), announce(incarnation=2)
    directory.hear(one, 0)
    directory.hear(other, 10)
    if ends == "leaves":
        directory.hear(announce(incarnation=2, state="leaving"), 20)
    else:
        directory.expire(111)
    assert directory.hear(one, 120) == [Joined(one)]
    directory.check()


def test_a_repeat_is_a_sign_of_life() -> None:
    directory = Directory(lost_after_ms=100)
    for now_ms in (0, 90):
        directory.hear(announce(), now_ms)
    assert directory.expire(190) == []
    assert directory.expire(191) == [Lost(announce(), "silent")]


def test_the_same_incarnation_may_return_from_silence() -> None:
    directory = Directory(lost_after_ms=100)
    directory.hear(announce(), 0)
    directory.expire(200)
    assert directory.hear(announce(), 300) == [Joined(announce())]


def test_a_new_incarnation_loses_the_old_one_first() -> None:
    directory = Directory(lost_after_ms=100)
    directory.hear(announce(incarnation=1), 0)
    assert directory.hear(announce(incarnation=2), 10) == [
        Lost(announce(incarnation=1), "replaced"),
        Joined(announce(incarnation=2)),
    ]
    assert directory.hear(announce(incarnation=1), 20) == []
    assert directory.of_role("decode") == [announce(incarnation=2)]
    directory.check()


def test_who_was_replaced_is_believed_again_once_its_successor_is_silent() -> None:
    directory = Directory(lost_after_ms=100)
    directory.hear(announce(incarnation=1), 0)
    directory.hear(announce(incarnation=7), 10)  # forged or damaged: nobody is behind it
    assert directory.hear(announce(incarnation=1), 60) == []
    assert directory.expire(111) == [Lost(announce(incarnation=7), "silent")]
    assert directory.hear(announce(incarnation=1), 120) == [Joined(announce(incarnation=1))]
    directory.check()


def test_all_who_were_replaced_are_believed_again_once_the_last_successor_is_silent() -> None:
    directory = Directory(lost_after_ms=100)
    for incarnation in (1, 7, 8):  # two were forged, one after the other
        directory.hear(announce(incarnation=incarnation), 10)
    assert directory.expire(111) == [Lost(announce(incarnation=8), "silent")]
    assert directory.hear(announce(incarnation=1), 120) == [Joined(announce(incarnation=1))]
    directory.check()


def test_who_said_good_bye_is_not_brought_back_by_a_late_message() -> None:
    directory = Directory(lost_after_ms=100)
    directory.hear(announce(), 0)
    leaving = announce(state="leaving")
    assert directory.hear(leaving, 10) == [Lost(leaving, "left")]
    assert directory.hear(announce(), 20) == []
    assert directory.hear(leaving, 30) == []


def test_being_deaf_ourselves_loses_nobody() -> None:
    directory = Directory(lost_after_ms=100)
    directory.hear(announce(), 0)
    directory.forgive(10_000)
    assert directory.expire(10_050) == []


def test_a_name_may_be_used_once_by_each_role() -> None:
    directory = Directory()
    directory.hear(announce(name="b"), 0)
    directory.hear(announce(name="a"), 0)
    directory.hear(announce(name="a", incarnation=9, role="prefill"), 0)
    assert [member.name for member in directory.of_role("decode")] == ["a", "b"]
    assert [member.incarnation for member in directory.of_role("prefill")] == [9]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),
            st.integers(1, 4),
            st.sampled_from(["ready", "draining", "leaving"]),
            st.integers(0, 150),
        ),
        max_size=60,
    )
)
def test_joins_and_losses_alternate_for_every_incarnation(
    steps: list[tuple[str, int, State, int]],
) -> None:
    directory = Directory(lost_after_ms=100)
    present: set[tuple[str, int]] = set()
    now_ms = 0
    for name, incarnation, state, wait_ms in steps:
        now_ms += wait_ms
        told = announce(name, incarnation * 10 + ord(name), state)
        for change in [*directory.expire(now_ms), *directory.hear(told, now_ms)]:
            key = (change.announce.name, change.announce.incarnation)
            match change:
                case Joined():
                    assert key not in present
                    present.add(key)
                case Lost():
                    present.remove(key)
                case Changed():
                    assert key in present
        directory.check()
        members = {(m.name, m.incarnation) for m in directory.of_role("decode")}
        assert members == present
