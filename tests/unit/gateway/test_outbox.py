"""What waits for its reader: so much, and no more of one that does not come."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.outbox import Outbox


async def test_a_reader_that_has_gone_away_while_it_waited_is_slow() -> None:
    outbox = Outbox(characters_max=10)
    reader = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait([reader])
    assert not outbox.put(0, ev.Deliver(0, 0, np.zeros(1, "<u4"), "x" * 11, None, 0))


@pytest.mark.parametrize(
    ("limits", "texts", "beyond"),
    [
        ({"events_max": 3}, ["a", "", "b"], ""),
        ({"characters_max": 3}, ["a", "", "bc", ""], "d"),
    ],
)
async def test_an_outbox_holds_what_it_may_and_the_end_besides(
    limits: dict[str, int], texts: list[str], beyond: str
) -> None:
    outbox = Outbox(**limits)
    events = [ev.Deliver(0, 0, np.zeros(1, "<u4"), text, None, 0) for text in [*texts, beyond]]
    taken = [outbox.put(0, event) for event in events]
    assert taken == [True] * len(texts) + [False]
    assert outbox.put(0, ev.Ended(ev.Completed()))
    assert [event for _, event in await outbox.take()] == [
        *events[:-1], ev.Ended(ev.Completed()),
    ]  # fmt: skip
