"""Made-up examples may wait, and may not compute without end."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.time_limits import OutOfTime

ONCE = settings(max_examples=1)


@pytest.mark.timeout(1)
@ONCE
@given(st.none())
def test_examples_that_stand_still_are_not_out_of_time(_: None) -> None:
    time.sleep(1.5)


@pytest.mark.timeout(1)
@ONCE
@given(st.none())
def test_examples_that_wait_for_ever_are_stopped(_: None) -> None:
    with pytest.raises(OutOfTime):
        threading.Event().wait(30)


@pytest.mark.timeout(1)
@ONCE
@given(st.none())
def test_examples_that_compute_without_end_are_stopped(_: None) -> None:
    with pytest.raises(OutOfTime):
        while True:
            pass


def test_no_example_is_blamed_for_the_end_of_time() -> None:
    tried_count = 0

    @ONCE
    @given(st.none())
    def endless(_: None) -> None:
        nonlocal tried_count
        tried_count += 1
        raise OutOfTime

    with pytest.raises(OutOfTime):
        endless()
    assert tried_count == 1, "it is not tried again"
