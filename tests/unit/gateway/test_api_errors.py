"""What a fault of the mesh looks like to a client: when to come back, and who is at fault."""

from __future__ import annotations

import pytest

from pagemesh.gateway.api.api_errors import ApiError, from_fault
from pagemesh.wire.errors import (
    Busy,
    DeadlineExceeded,
    Disconnected,
    Fault,
    Internal,
    NoCapacity,
    NotReady,
    OverQuota,
    Superseded,
)


@pytest.mark.parametrize(
    ("after_ms", "header"), [(0, None), (1, "1"), (1_000, "1"), (1_001, "2"), (2_500, "3")]
)
def test_a_client_is_told_to_come_back_no_sooner_than_it_may(
    after_ms: int, header: str | None
) -> None:
    assert ApiError(503, "x", retry_after_ms=after_ms).headers.get("retry-after") == header


def test_what_took_too_long_is_not_to_be_asked_again_by_itself() -> None:
    error = from_fault(DeadlineExceeded("x", retry_after_ms=7_000))
    assert (error.status, error.headers) == (504, {"x-should-retry": "false"})


@pytest.mark.parametrize("kind", [Busy, NotReady, Disconnected, Superseded, NoCapacity, OverQuota])
def test_what_may_go_next_time_says_when_that_is(kind: type[Fault]) -> None:
    error = from_fault(kind("x", retry_after_ms=7_000))
    assert (error.status, error.headers) == (503, {"retry-after": "7"})


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (NoCapacity("too long"), "context_length_exceeded"),
        (OverQuota("too much"), "quota_exceeded"),
    ],
)
def test_what_can_never_go_is_told_in_the_words_of_who_knows(fault: Fault, code: str) -> None:
    error = from_fault(fault)
    assert (error.status, error.code, error.message) == (400, code, fault.message)
    assert error.headers == {}


@pytest.mark.parametrize(
    "fault", [Internal("secret"), Busy("secret"), NoCapacity("secret", retry_after_ms=1)]
)
def test_what_goes_on_within_is_not_quoted(fault: Fault) -> None:
    assert b"secret" not in from_fault(fault).body()
