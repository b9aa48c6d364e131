"""``pagemesh replay``: what is read, what is counted, and what the optimum is."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from pagemesh.cli.main import run
from pagemesh.cli.replaying.optimum import optimal_rate, unbounded_rate
from pagemesh.cli.replaying.pager import ReplayPager, hit_rate
from pagemesh.cli.replaying.report import PLOT_ENDINGS, Scores, check_plot, save_plot
from pagemesh.cli.replaying.trace import Trace, read_trace
from pagemesh.pager.eviction import POLICIES
from pagemesh.pager.eviction.learned import Learned
from pagemesh.wire.errors import ConfigError


def trace_file(folder: Path, *prompts: list[int]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps({"timestamp": 0, "hash_ids": p}) + "\n" for p in prompts))
    return path


def made_trace(seed: int, request_count: int, *, scored_from: int = 0) -> Trace:
    """Short prompts over few blocks, so that every small cache is under pressure."""
    rng, places, prompts = random.Random(seed), dict[tuple[int, ...], int](), []
    for _ in range(request_count):
        ids = tuple(rng.choices(range(3), k=rng.randint(1, 4)))
        starts = [ids[:end] for end in range(1, len(ids) + 1)]
        prompts.append(tuple(places.setdefault(start, len(places)) for start in starts))
    return Trace("made", tuple(prompts), scored_from)


def test_a_trace_is_read_into_places_that_are_equal_only_with_all_before_them(
    tmp_path: Path,
) -> None:
    trace = read_trace(trace_file(tmp_path, [7, 8, 9], [7, 8], [5, 8]), 1.0)
    assert trace.prompts == ((0, 1, 2), (0, 1), (3, 4))
    assert (trace.scored_from, trace.scored_blocks, trace.block_count) == (0, 7, 5)


def test_the_last_share_of_the_requests_is_scored(tmp_path: Path) -> None:
    path = trace_file(tmp_path, [1], [2], [3], [4])
    assert read_trace(path, 0.5).scored_from == 2
    assert read_trace(path, 0.01).scored_from == 3
    assert read_trace(path, 0.5).without_warm_up().prompts == ((2,), (3,))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"hash_ids": [1, "x"]}', "Expected `int`, got `str`"),
        ('{"hash_ids": [1', "truncated"),
        ('{"timestamp": 1}', "missing required field `hash_ids`"),
        ('{"hash_ids": []}', "0 hash_ids"),
        ('{"hash_ids": [1], "more": ' + "[" * 200_000, "recursion"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens", "lengths alone"),
    ],
)
def test_a_malformed_line_is_one_line_that_names_it_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"hash_ids": [1]}\n\n' + line + "\n")
    assert run(["replay", str(path)]) == 2
    shown = capsys.readouterr()
    [error] = shown.err.splitlines()
    assert error.startswith("error: ") and "bad.jsonl, line 3" in error and said in error
    assert not shown.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl"),
        (["x", "--capacity", "10,many"], "'10,many'"),
        (["x", "--capacity", "10,1"], "'10,1' is not block counts such as 1000,10000 (2 to"),
        (["x", "--policy", "mru"], "mru"),
        (["x", "--score-last", "0"], "--score-last"),
        (["x", "--score-last", "nan"], "'nan' is no number 0<x<=1"),
    ],
)
def test_what_cannot_be_replayed_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert run(["replay", *arguments]) == 2
    [error] = capsys.readouterr().err.splitlines()
    assert said in error


def test_a_line_that_does_not_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="trace /dev/zero, line 1 is too long; is it a trace"):
        read_trace(Path("/dev/zero"), 1.0)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        read_trace(trace_file(tmp_path), 1.0)


@pytest.mark.parametrize(
    "stored",
    [
        lambda text: b"\xef\xbb\xbf" + text,
        gzip.compress,
        lambda t: gzip.compress(t[:9]) + gzip.compress(t[9:]),
    ],
)
def test_a_trace_may_have_a_byte_order_mark_or_be_gzipped(
    tmp_path: Path, stored: Callable[[bytes], bytes]
) -> None:
    path = trace_file(tmp_path, [7, 8, 9], [7, 8])
    plain = read_trace(path, 1.0)
    path.write_bytes(stored(path.read_bytes()))
    assert read_trace(path, 1.0) == plain


_LINE = '{"hash_ids": [1]}\n'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (_LINE.encode("utf-16"), "is UTF-16; convert it: iconv"),
        (_LINE.encode("utf-16-be"), "is UTF-16; convert it: iconv"),
        (gzip.compress(_LINE.encode() * 99)[:-9], "broken gzip"),
        (b"\x1f\x8bno gzip", "broken gzip"),
        (gzip.compress(_LINE.encode())[:12] + b"\xff" * 30, "broken gzip"),
    ],
)
def test_a_trace_in_another_form_is_told_what_to_do(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_trace(path, 1.0)


def test_the_pager_counts_the_blocks_that_match_from_the_start() -> None:
    pager = ReplayPager(16, "lru")
    assert [pager.serve(p) for p in ([1, 2, 3], [1, 2, 4], [2, 3], [1, 2, 3])] == [0, 2, 0, 3]
    pager.core.check()


def test_what_a_policy_puts_off_is_done_every_256_requests() -> None:
    pager = ReplayPager(1_024, "learned")
    policy = pager.core.books.accounts.common.policy
    assert isinstance(policy, Learned)
    for number in range(255):
        pager.serve([number])
    put_off = len(policy._heard)
    pager.serve([255])
    assert put_off and len(policy._heard) == put_off // 255


def test_a_prompt_that_the_pool_cannot_hold_hits_nothing_and_drives_nothing_out() -> None:
    pager = ReplayPager(8, "lru")
    pager.serve([1, 2, 3])
    assert pager.serve(range(1, 9)) == 0
    assert pager.serve([1, 2, 3]) == 3


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_count", [6, 12, 24])
def test_no_policy_hits_more_than_the_optimum(policy: str, page_count: int) -> None:
    trace = made_trace(page_count, 400, scored_from=100)
    rate = hit_rate(trace, page_count, policy, lambda _count: None)
    assert 0 < rate <= optimal_rate(trace, page_count) <= unbounded_rate(trace)


@pytest.mark.parametrize(("policy", "page_count"), [("lru", 200), ("learned", 200)])
def test_with_room_for_everything_every_repeat_is_a_hit(policy: str, page_count: int) -> None:
    trace = made_trace(1, 200)
    assert hit_rate(trace, page_count, policy, lambda _count: None) == unbounded_rate(trace)
    assert optimal_rate(trace, page_count) == unbounded_rate(trace)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("scored_from", [0, 3])
def test_the_optimum_is_what_trying_everything_finds_of_prefix_caches(
    seed: int, scored_from: int
) -> None:
    trace = made_trace(seed, 6, scored_from=scored_from)
    parents = {
        block: before
        for prompt in trace.prompts
        for before, block in itertools.pairwise((-1, *prompt))
    }
    accesses = [block for prompt in trace.prompts for block in prompt]
    first = len(accesses) - trace.scored_blocks

    @cache
    def best(at: int, held: frozenset[int]) -> int:
        """Hits still to be had by a cache of three blocks, each held with those before it."""
        if at == len(accesses):
            return 0
        block = accesses[at]
        choices = [
            frozenset(kept)
            for size in range(4)
            for kept in itertools.combinations(sorted(held | {block}), size)
            if all(parents[one] in {-1, *kept} for one in kept)
        ]
        return (block in held and at >= first) + max(best(at + 1, kept) for kept in choices)

    wanted = best(0, frozenset()) / trace.scored_blocks
    assert optimal_rate(trace, 3) == pytest.approx(wanted)


def test_the_report_has_each_policy_at_each_capacity_beside_the_optimum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace_file(tmp_path, *([n % 3, 10 + n] for n in range(20)))
    arguments = ["replay", str(path), "--capacity", "4,40", "--policy", "lru", "--policy", "lfu"]
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    assert "20 requests, 23 different blocks; scored: all of them, 40 blocks" in shown
    for row in ("lru ", "lfu ", "optimum "):
        [line] = [line for line in shown.splitlines() if line.startswith(row)]
        assert line.split()[-1] == "0.4250"
    assert run([*arguments, "--json", "--score-last", "0.5", "--cold"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hit_rates"]["lru"][1] == found["optimum"][1] == found["unbounded"] == 0.35
    assert (found["requests"], found["scored_requests"], found["cold"]) == (20, 10, True)


def test_a_plot_without_matplotlib_says_at_once_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot = str(tmp_path / "rates.png")
    assert run(["replay", "no trace is looked for", "--plot", plot]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rates.xyz", "give it an ending that can be drawn: .png, .svg"),
        ("rates", "give it an ending that can be drawn"),
        ("nowhere/rates.png", "there is no folder"),
        ("long" * 100 + "/rates.png", "there is no folder"),
    ],
)
def test_a_plot_that_cannot_be_drawn_is_refused_before_the_trace_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    name: str, said: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: ModuleType("matplotlib"))
    plot = tmp_path / name
    assert run(["replay", "no trace is looked for", "--plot", str(plot)]) == 2
    [error] = capsys.readouterr().err.splitlines()
    assert f"--plot {plot}: " in error and said in error


def test_a_plot_is_not_written_where_nobody_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: ModuleType("matplotlib"))
    monkeypatch.setattr("os.access", lambda path, _mode: Path(path) != tmp_path)
    check_plot(tmp_path / ".." / "rates.svg")
    with pytest.raises(ConfigError, match="cannot be written"):
        check_plot(tmp_path / "rates.svg")


_STARTS = {
    ".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF", ".eps": b"%!PS", ".jpg": b"\xff\xd8",
    ".jpeg": b"\xff\xd8", ".webp": b"RIFF",
}  # fmt: skip


@pytest.mark.parametrize("ending", [*PLOT_ENDINGS, ".PNG"])
def test_rates_are_drawn_as_the_ending_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    pytest.importorskip("matplotlib")
    trace, plot = trace_file(tmp_path, [1, 2], [1, 3], [1, 2]), tmp_path / f"rates{ending}"
    assert run(["replay", str(trace), "--capacity", "4,40", "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(_STARTS[ending.lower()])
    assert "optimum" in capsys.readouterr().out


def test_a_plot_that_a_full_disk_does_not_take_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "rates.png"
    plot.symlink_to("/dev/full")
    trace = trace_file(tmp_path, [1, 2], [1, 3])
    assert run(["replay", str(trace), "--capacity", "4", "--plot", str(plot)]) == 1
    shown = capsys.readouterr()
    assert shown.err == f"error: {plot} could not be written: No space left on device\n"
    assert "optimum" in shown.out


def test_a_trace_whose_name_is_no_text_is_drawn_with_a_mark(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = trace_file(tmp_path, [1, 2], [1, 3]).rename(tmp_path / "caf\udce9.jsonl")
    plot = tmp_path / "rates.svg"
    assert run(["replay", str(trace), "--capacity", "4", "--plot", str(plot)]) == 0
    assert "<!-- caf\ufffd.jsonl -->" in plot.read_text()


def test_a_plot_has_a_line_for_each_policy_and_for_the_optimum(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    scores = Scores((10, 100), {"lru": (0.1, 0.2), "s3-fifo": (0.15, 0.2)}, (0.2, 0.3), 0.4)
    plot = tmp_path / "rates.svg"
    save_plot(plot, made_trace(1, 3), scores)
    drawn = plot.read_text()
    for label in ("lru", "s3-fifo", "optimum", "no limit", "hit rate", "made"):
        assert f"<!-- {label} -->" in drawn, label


def test_a_plot_that_fails_all_the_same_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    scores = Scores((10,), {"lru": (0.1,)}, (0.2,), 0.4)
    with pytest.raises(ConfigError, match="gone"):
        save_plot(tmp_path / "gone" / "rates.png", made_trace(1, 3), scores)
