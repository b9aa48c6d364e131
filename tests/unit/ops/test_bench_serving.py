"""The serving benchmark has to ask everyone the same, and to count honestly what comes back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from ops.bench.bench_serving import keep
from ops.bench.serving import table, workloads
from ops.bench.serving.floor import Machine, Shape, floor_tokens_s
from ops.bench.serving.load import Round, run_round, summary
from ops.bench.serving.workloads import WORKLOADS, Word, Workload, prompts, words_of
from tests.support.answering import Answering
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pagemesh.cli.benching.client import Reply, RequestFailedError

WORDS = [Word(token, f" word{token}") for token in range(50)]


# Workloads ---------------------------------------------------------------------------------------


def test_every_server_is_asked_the_same_and_every_round_something_new() -> None:
    workload = WORKLOADS["8 at once"]
    assert prompts(workload, WORDS, "a") == prompts(workload, WORDS, "a")
    assert prompts(workload, WORDS, "a") != prompts(workload, WORDS, "b")


def test_users_share_the_prefix_of_a_workload_and_nothing_else() -> None:
    workload = Workload(3, 1, 20, 10, 0, 4, 1.0)
    said = [user[0] for user in prompts(workload, WORDS, "a")]
    assert {len(prompt) for prompt in said} == {30}
    assert len({prompt[:20] for prompt in said}) == 1
    assert len({prompt[20:] for prompt in said}) == 3


def test_a_talk_adds_a_little_in_each_turn_and_other_turns_are_new_prompts() -> None:
    talk = prompts(Workload(1, 3, 0, 10, 2, 4, 1.0), WORDS, "a")[0]
    assert [len(prompt) for prompt in talk] == [10, 2, 2]
    apart = prompts(Workload(1, 3, 0, 10, 0, 4, 1.0), WORDS, "a")[0]
    assert [len(prompt) for prompt in apart] == [10, 10, 10]


def test_a_model_without_words_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="only 0 tokens of the model are whole words"):
        words_of(Tokenizer(WordLevel({"a": 0}, unk_token="a")))


# Against a server --------------------------------------------------------------------------------


async def test_a_round_counts_every_token_and_not_the_warm_up() -> None:
    server = Answering()
    async with server.listening() as found:
        seen = await run_round(found, Workload(2, 2, 0, 6, 0, 5, 1.0), WORDS, "a")
    assert round(seen.output_tokens_s * seen.wall_s) == 20
    assert [len(body["prompt"]) for body in server.bodies] == [32, 6, 6, 6, 6]  # type: ignore[arg-type]
    assert all(body["ignore_eos"] for body in server.bodies)


async def test_a_talk_goes_on_with_what_was_answered() -> None:
    server = Answering()
    async with server.listening() as found:
        await run_round(found, Workload(1, 2, 0, 3, 1, 2, 1.0), WORDS, "a")
    said = prompts(Workload(1, 2, 0, 3, 1, 2, 1.0), WORDS, "a")[0]
    first, second = (body["prompt"] for body in server.bodies[1:])
    assert first == workloads.text(said[0])
    assert second == f"{first} so so{workloads.text(said[1])}"


async def test_a_plain_server_gets_text_and_only_what_openai_has() -> None:
    server = Answering()
    async with server.listening(plain=True) as found:
        await run_round(found, Workload(1, 1, 0, 3, 0, 2, 1.0), WORDS, "a")
    assert all(isinstance(body["prompt"], str) for body in server.bodies)
    assert not any({"ignore_eos", "stream_options"} & set(body) for body in server.bodies)


# Figures -----------------------------------------------------------------------------------------


def reply(sent_s: float, arrivals_s: Sequence[float], output_tokens: int) -> Reply:
    return Reply(sent_s, tuple(arrivals_s), arrivals_s[-1], "", 4, output_tokens, None)


def test_times_are_medians_over_requests_and_speed_is_over_the_whole_round() -> None:
    seen = summary([reply(0, [1, 2, 3], 3), reply(1, [4, 6], 5), reply(0, [5, 9], 3)], 10.0)
    assert seen.output_tokens_s == pytest.approx(1.1)
    assert (seen.first_ms, seen.gap_ms, seen.gap_p99_ms) == (3_000, 1_500, 4_000)
    assert seen.token_ms == 1_000
    assert seen.cached_tokens is None


def test_a_reply_without_a_whole_character_counts_for_speed_and_has_no_times() -> None:
    silent = Reply(0.0, (), 9.0, "", 4, 7, None)
    seen = summary([reply(0, [1, 2], 2), silent], 9.0)
    assert (seen.output_tokens_s, seen.first_ms) == (1.0, 1_000)
    with pytest.raises(RequestFailedError, match="nothing can be timed"):
        summary([silent], 9.0)


def figures(output_tokens_s: float, first_ms: float) -> Round:
    return Round(output_tokens_s, first_ms, 1.0, 1.0, 1.0, 1.0, None)


def test_ours_is_held_against_the_fastest_and_against_the_soonest_round_by_round() -> None:
    line = table.row("S", "chat", {
        "pagemesh": [figures(30, 10), figures(60, 10), figures(45, 10)],
        "fast": [figures(20, 40), figures(20, 40), figures(20, 40)],
        "soon": [figures(5, 20), figures(5, 5), figures(5, 20)],
    }, [100.0])  # fmt: skip
    assert (line["speed"]["peer"], line["speed"]["ratio"]) == ("fast", 2.25)
    assert (line["speed"]["ratio_min"], line["speed"]["ratio_max"]) == (1.5, 3.0)
    assert (line["first"]["peer"], line["first"]["ratio"]) == ("soon", 0.5)


def test_a_report_keeps_the_rows_that_were_not_measured_again() -> None:
    rounds = {"pagemesh": [figures(30, 10)]}
    old = [table.row("M", "single", rounds, [50.0]), table.row("S", "chat", rounds, [50.0])]
    new = [table.row("S", "chat", {"pagemesh": [figures(99, 10)]}, [100.0])]
    rows = table.merged({"rows": old}, new)
    assert [(one["model"], one["workload"]) for one in rows] == [("S", "chat"), ("M", "single")]
    assert rows[0]["servers"]["pagemesh"]["median"]["output_tokens_s"] == 99


def test_a_run_without_peers_does_not_take_the_place_of_a_comparison() -> None:
    beside = {"pagemesh": [figures(30, 10)], "other": [figures(10, 20)]}
    compared = table.row("S", "single", beside, [50.0])
    alone = table.row("S", "single", {"pagemesh": [figures(99, 10)]}, [50.0])
    rows = table.merged({"rows": [compared]}, [alone])
    assert rows == [compared, alone]
    assert [table.name_of(one) for one in rows] == ["S single", "S, alone single"]
    assert table.merged({"rows": rows}, [alone, compared]) == rows


def test_rows_of_other_set_ups_are_kept() -> None:
    rounds = {"pagemesh": [figures(30, 10)], "other": [figures(10, 20)]}
    rows = [table.row(label, "single", rounds, [50.0]) for label in ("S", "S, one worker")]
    assert table.merged({"rows": rows[:1]}, rows[1:]) == rows


def test_a_row_is_kept_as_soon_as_it_was_measured(tmp_path: Path) -> None:
    report = tmp_path / "serving.json"
    rounds = {"pagemesh": [figures(30, 10)], "other": [figures(10, 20)]}
    first, second = (table.row("S", name, rounds, [50.0]) for name in ("single", "chat"))
    assert keep(first, report) == [first]
    assert keep(second, report) == [first, second]
    assert json.loads(report.read_text())["rows"] == [first, second]


def test_of_the_largest_model_the_same_is_wanted_in_every_workload() -> None:
    rounds = {"pagemesh": [figures(12.5, 10)], "other": [figures(10, 20)]}
    lines = [table.row("L, one worker", name, rounds, [50.0]) for name in WORKLOADS]
    assert {line["speed"]["aim"] for line in lines} == {1.2}
    assert {line["floor"]["of_floor"]["aim"] for line in lines} == {0.24}
    assert "missed" not in table.as_text(lines)
    assert "1.25 (1.8, missed)" in table.as_text([table.row("M", "8 at once", rounds, [50.0])])


def test_the_table_says_which_aims_were_missed() -> None:
    met = {"pagemesh": [figures(30, 10)], "other": [figures(10, 20)]}
    missed = {"pagemesh": [figures(11, 30)], "other": [figures(10, 20)]}
    text = table.as_text(
        [
            table.row("S", "single", met, [40.0, 60.0, 50.0]),
            table.row("S", "shared", missed, [25.0]),
        ]
    )
    assert (
        "| S single | 30.0, 10, 1.0 | 10.0, 20, 1.0 | 3.00 (1.3), other | 0.50 (1), other "
        "| 0.60 (0.26) |"
    ) in text
    assert "1.10 (2, missed), other | 1.50 (1, missed), other | 0.44 (0.80) |" in text


# What the machine would allow --------------------------------------------------------------------

SHAPE = Shape(layers=1_000, head=100, query=0, kv=10)
MEMORY = Machine(memory_bytes_s=4.0, operations_s=1e12)  # a float32 a second
ARITHMETIC = Machine(memory_bytes_s=1e12, operations_s=2.0)  # a multiply-add a second


def test_the_floor_of_answers_reads_weights_once_for_all_and_what_they_share_once() -> None:
    apart = floor_tokens_s(SHAPE, Workload(2, 1, 0, 8, 0, 3, 1.0), MEMORY)
    # A step of prompts, and two of answers, each at 9 tokens of context in the middle.
    assert 6 / apart == pytest.approx(1_100 + 2 * (1_100 + 2 * 9 * 10))
    shared = floor_tokens_s(SHAPE, Workload(2, 1, 6, 2, 0, 3, 1.0), MEMORY)
    assert 6 / shared == pytest.approx(1_100 + 2 * (1_100 + (6 + 2 * 3) * 10))


def test_the_floor_of_prompts_is_arithmetic_over_what_was_not_computed_before() -> None:
    apart = floor_tokens_s(SHAPE, Workload(2, 1, 0, 8, 0, 1, 1.0), ARITHMETIC)
    assert 2 / apart == pytest.approx(16 * 1_000 + 2 * 100)
    shared = floor_tokens_s(SHAPE, Workload(2, 1, 6, 2, 0, 1, 1.0), ARITHMETIC)
    assert 2 / shared == pytest.approx(10 * 1_000 + 2 * 100)
    talk = floor_tokens_s(SHAPE, Workload(1, 2, 0, 8, 3, 1, 1.0), ARITHMETIC)
    assert 2 / talk == pytest.approx((8 + 3) * 1_000 + 2 * 100)


def test_the_floor_counts_what_a_query_attends_to() -> None:
    wide = Shape(layers=0, head=0, query=1, kv=0)
    once = floor_tokens_s(wide, Workload(1, 1, 0, 4, 0, 1, 1.0), ARITHMETIC)
    assert 1 / once == pytest.approx(2 * (1 + 2 + 3 + 4))
    talk = floor_tokens_s(wide, Workload(1, 2, 0, 4, 2, 1, 1.0), ARITHMETIC)
    assert 2 / talk == pytest.approx(2 * (1 + 2 + 3 + 4) + 2 * (6 + 7))
