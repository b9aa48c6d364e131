"""The error tree: typed faults travel and come back as what they were."""

from __future__ import annotations

import pytest

from pagemesh.wire import errors
from pagemesh.wire.errors import Busy, Fault, Gone, Internal, PagemeshError, fault, first_line
from pagemesh.wire.messages import Refused


@pytest.mark.parametrize("kind", list(Fault.codes.values()), ids=list(Fault.codes))
def test_a_fault_comes_back_from_the_wire_as_itself(kind: type[Fault]) -> None:
    back = Refused.of(kind("why", retry_after_ms=5)).error()
    assert type(back) is kind
    assert (back.message, back.retry_after_ms, back.code) == ("why", 5, kind.__name__)


def test_the_tree_is_drawn_where_it_is_defined() -> None:
    drawing = errors.__doc__ or ""
    for name in (*Fault.codes, "ConfigError", "PagemeshError"):
        assert f" {name} " in drawing or f"\n{name}\n" in drawing, name
    assert all(issubclass(kind, PagemeshError) for kind in Fault.codes.values())


def test_an_unknown_code_is_internal_and_does_not_raise() -> None:
    assert type(fault("__class__", "x")) is Internal
    assert type(Refused(code="SystemExit", message="x").error()) is Internal


def test_a_lost_bus_is_a_busy_and_a_missing_service_a_gone() -> None:
    assert isinstance(fault("Disconnected", "x"), Busy)
    assert isinstance(fault("Absent", "x"), Gone)


def test_a_long_message_is_cut_to_what_may_travel() -> None:
    assert len(Refused.of(Busy("x" * 10_000)).message) == 1_024


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("it is wrong\nand more", "it is wrong"),
        ("field 'a':\n    expected int, got str\nand more", "field 'a': expected int, got str"),
        ("field 'a':", "field 'a':"),
        ("\n \n", "ValueError"),
    ],
)
def test_what_others_say_is_told_with_its_reason(said: str, shown: str) -> None:
    assert first_line(ValueError(said)) == shown
