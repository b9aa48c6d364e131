"""``pagemesh bench`` asks what it says, as many at once as it says, and tells what came of it."""

from __future__ import annotations

import asyncio
import time
from itertools import islice, pairwise
from random import Random

import pytest
from tests.support.answering import Answering

from pagemesh.cli.benching.client import Reply, Server
from pagemesh.cli.benching.load import Outcome, ask_all
from pagemesh.cli.benching.prompts import SAMPLE, moments, prompts
from pagemesh.cli.benching.report import Asked, json_report, text_report
from pagemesh.cli.main import run

ASKED = Asked("m", "http://there", 4, 2, None, 6, 2, 3, 7)


def none() -> None:
    """For tests that look at something else."""


# Prompts -----------------------------------------------------------------------------------------


def test_prompts_have_their_beginning_in_common_and_nothing_else() -> None:
    found = [*prompts(range(500), 3, 30, 20, Random(1))]
    assert {len(prompt) for prompt in found} == {30}
    assert len({tuple(prompt[:20]) for prompt in found}) == 1
    assert len({tuple(prompt[20:]) for prompt in found}) == 3
    assert found == [*prompts(range(500), 3, 30, 20, Random(1))]
    assert found != [*prompts(range(500), 3, 30, 20, Random(2))]
    assert [len(prompt) for prompt in prompts(range(500), 2, 4, 4, Random(1))] == [4, 4]


def test_moments_are_at_random_and_as_many_a_second_as_was_said() -> None:
    found = [*islice(moments(20.0, Random(1)), 4_000)]
    assert found[0] == 0.0 and found == sorted(found)
    assert found[-1] == pytest.approx(4_000 / 20.0, rel=0.05)
    gaps = [later - earlier for earlier, later in pairwise(found)]
    assert sum(gap > 1 / 20 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)


def test_what_is_tokenised_for_prompts_has_every_pair_of_letters_once() -> None:
    pairs = SAMPLE.split(" ")
    assert len(pairs) == len(set(pairs)) == 26 * 26 and {len(pair) for pair in pairs} == {2}


# Load --------------------------------------------------------------------------------------------


async def test_no_more_are_under_way_at_once_than_was_said() -> None:
    server, ended = Answering(pause_s=0.02), []
    async with server.listening() as found:
        outcome = await ask_all(
            found, [(0.0, [1, 2])] * 9, 3, concurrency=3, on_end=lambda: ended.append(1)
        )
    assert server.at_once_max == 3
    assert (len(outcome.replies), len(ended), outcome.failures) == (9, 9, [])
    assert [reply.output_tokens for reply in outcome.replies] == [3] * 9
    assert outcome.wall_s >= 3 * 0.02 and not outcome.stopped


async def test_who_has_a_moment_is_asked_then_however_many_wait() -> None:
    server, moments_s = Answering(pause_s=1.0), [0.0, 0.0, 0.3, 0.3]
    async with server.listening() as found:
        started_s = time.perf_counter()
        outcome = await ask_all(
            found, [(each_s, [1]) for each_s in moments_s], 1, on_end=none,
        )  # fmt: skip
    assert server.at_once_max == 4
    sent_s = sorted(reply.sent_s - started_s for reply in outcome.replies)
    assert sent_s[1] < 0.29 < sent_s[2]


async def test_what_fails_is_counted_and_the_rest_is_asked_all_the_same() -> None:
    async with Answering(status=503).listening() as found:
        outcome = await ask_all(found, [(0.0, [1])] * 3, 2, concurrency=1, on_end=none)
    assert not outcome.replies and len(outcome.failures) == 3
    assert all("other: status 503" in text for text in outcome.failures)


async def test_who_stops_it_has_what_is_there() -> None:
    server = Answering(pause_s=0.02)

    async def asking(found: Server) -> Outcome:
        return await ask_all(found, [(0.0, [1])] * 500, 1, concurrency=2, on_end=none)

    async with server.listening() as found:
        task = asyncio.create_task(asking(found))
        await asyncio.sleep(0.2)
        task.cancel()
        outcome = await task
        await asyncio.sleep(0.05)  # for what was under way there to end
    assert outcome.stopped and 0 < len(outcome.replies) < 500 and not outcome.failures
    assert text_report(ASKED, outcome).splitlines()[-1].startswith("stopped after")


# Report ------------------------------------------------------------------------------------------


def reply(sent_s: float, *arrivals_s: float, cached_tokens: int | None = 2) -> Reply:
    return Reply(sent_s, arrivals_s, arrivals_s[-1], "", 6, 3, cached_tokens)


def test_times_are_of_requests_and_rates_of_the_whole_load() -> None:
    replies = [reply(0, 1, 2), reply(1, 4, 6), reply(0, 1.5, 2.5)]
    assert text_report(ASKED, Outcome(replies, wall_s=6.0)) == (
        "m at http://there: 4 requests, 2 at once, 6 tokens in (2 in common), 3 out, seed 7\n"
        "\n"
        "                         median        90%        99%\n"
        "first text, ms          1,500.0    3,000.0    3,000.0\n"
        "a token after it, ms      500.0    1,000.0    1,000.0\n"
        "between chunks, ms      1,000.0    2,000.0    2,000.0\n"
        "whole answer, ms        2,500.0    5,000.0    5,000.0\n"
        "\n"
        "1.5 tokens a second out, 4.5 with prompts; 0.50 requests a second; 6.0 s\n"
        "6 of 18 prompt tokens came from the cache"
    )


def test_a_server_that_does_not_say_what_was_cached_is_not_said_to_have_cached_nothing() -> None:
    outcome = Outcome([reply(0, 1, 2, cached_tokens=None)], wall_s=2.0)
    assert "cache" not in text_report(ASKED, outcome)
    assert json_report(ASKED, outcome)["cached_tokens"] is None


def test_failures_are_told_by_kind_and_alone_where_nothing_was_answered() -> None:
    outcome = Outcome([], ["busy", "busy", "gone"], wall_s=1.0)
    assert text_report(ASKED, outcome).splitlines()[1:] == [
        "", "3 of 3 requests failed:", "  2 times: busy", "  1 time: gone",
    ]  # fmt: skip
    told = json_report(ASKED, outcome)
    assert (told["answered"], told["failures"], told["ms"]) == (0, {"busy": 2, "gone": 1}, {})


def test_answers_without_a_whole_character_count_for_rates_and_have_no_times() -> None:
    silent = Reply(0.0, (), 4.0, "", 6, 3, 0)
    told = json_report(ASKED, Outcome([silent], wall_s=3.0))
    assert told["a_second"]["output_tokens"] == 1.0 and told["ms"] == {}


# Command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "2", "--concurrency", "3"], "--rate and --concurrency exclude each other"),
        (["--shared-tokens", "600"], "--shared-tokens is more than --input-tokens"),
        (["--rate", "0"], "--rate"),
        (["--url", "http://127.0.0.1:9"], "no mesh at http://127.0.0.1:9"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1
