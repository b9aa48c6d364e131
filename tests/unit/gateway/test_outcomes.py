"""Whose fault it is that a request ends without an answer, as the metrics tell it."""

from __future__ import annotations

import pytest

from pagemesh.gateway import measures
from pagemesh.gateway.api.api_errors import ApiError, bad, cancelled, from_fault
from pagemesh.gateway.calls.call_facts import outcome_of, refusals_counted
from pagemesh.wire.errors import Busy, Internal, NoCapacity, OverQuota


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (bad("n", "n must be at least 1"), "refused"),
        (ApiError(404, "the model does not exist", "model", "model_not_found"), "refused"),
        (from_fault(NoCapacity("the prompt can never fit")), "refused"),
        (from_fault(OverQuota("more than its tenant may use")), "refused"),
        (ApiError(429, "your limit is reached", code="quota_exceeded"), "refused"),
        (ApiError(429, "too many requests at once"), "failed"),
        (from_fault(Busy("the queue is full", retry_after_ms=5)), "failed"),
        (from_fault(Internal("a bug")), "failed"),
        (cancelled("stopped"), "failed"),
    ],
)
def test_a_request_is_refused_where_nobody_but_its_client_can_mend_it(
    error: ApiError, outcome: str
) -> None:
    assert outcome_of(error) == outcome


def test_what_is_refused_before_it_is_a_call_counts_once() -> None:
    refused = measures.requests.labels("bus", "chat", "refused")
    before = refused._value.get()
    with pytest.raises(ApiError), refusals_counted("bus", chat=True):
        raise bad("n", "n must be at least 1")
    with refusals_counted("bus", chat=True):
        pass
    assert refused._value.get() == before + 1
