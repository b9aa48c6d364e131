"""Figures that are kept end in one table and one picture, with what is wanted of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from ops.bench import aims, bench_step, summary
from ops.bench.figures import Figure, figures_of, machine_of
from ops.bench.serving import table
from ops.bench.serving.load import Round

RESULTS = Path(__file__).parents[3] / "ops" / "bench" / "results"
ON = {"commit": "abc123", "cpu": "model name AMD EPYC", "cores": 2}


def rounds(output_tokens_s: float, first_ms: float) -> list[Round]:
    return [Round(output_tokens_s, first_ms, 1.0, 1.0, 1.0, 1.0, None)]


def serving(model: str, **servers: list[Round]) -> dict[str, Any]:
    return table.row(model, "single", servers, [50.0]) | {"on": ON}


def line_of(text: str, figure: str) -> list[str]:
    """The cells of the one line that tells ``figure``."""
    [line] = [line for line in text.splitlines() if figure in line]
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_a_figure_stands_with_its_aim_machine_and_commit() -> None:
    row = serving("S", pagemesh=rounds(26, 10), vllm=rounds(20, 20))
    text = summary.as_text(figures_of("serving", {"rows": [row]}))
    assert line_of(text, "tokens/s") == [
        "serving", "S single: tokens/s over vllm's", "1.3", ">= 1.3", "met",
        "AMD EPYC, 2 cores", "abc123",
    ]  # fmt: skip
    assert line_of(text, "first text")[2:5] == ["0.5", "<= 1", "met"]


def test_what_was_measured_beside_ourselves_or_nobody_is_told_without_an_aim() -> None:
    alone = serving("S", pagemesh=rounds(26, 10))
    variant = serving("S", pagemesh=rounds(26, 10), always=rounds(20, 20))
    told = figures_of("serving", {"rows": [alone]}) + figures_of("runs", {"rows": [variant]})
    assert [one.name for one in told] == [
        "S, alone single: tokens/s",
        "S single: tokens/s over always's",
        "S: first text over the soonest peer's",
    ]
    assert {one.aim for one in told} == {None}


def test_short_prompts_are_no_long_ones() -> None:
    """Their requests take less, and the aim is of long ones."""
    loads = {"small": {"p50_us": 61.0}, "short": {"p50_us": 30.0}, "machine": {}}
    report = {"machine": ON, "aims": {"p50_us": {"core": 60.0}}, "results": {"core": loads}}
    text = summary.as_text(figures_of("pager", report))
    assert line_of(text, "8,192 tokens")[2:5] == ["61", "<= 60", "missed"]
    assert line_of(text, "1,024 tokens")[2] == "30"


def test_values_with_one_aim_are_one_figure_that_says_how_many_met_it() -> None:
    results = [
        {"model": model, "weights": "float32", "rows": "float32", "case": "batch 8",
         "of_floor_median": of, "on": ON | {"backend": "native-8-avx512"}}
        for model, of in (("S", 0.7), ("M", 0.9), ("L", 0.75))
    ]  # fmt: skip
    [one] = figures_of("step_zen5", {"results": results})
    cells = line_of(summary.as_text([one]), "batch 8")
    assert cells[2:6] == ["0.7 to 0.9", ">= 0.75", "2 of 3 met", "AMD EPYC avx512, 2 cores"]


def test_parts_of_an_aim_are_above_one_where_it_is_met_whichever_way_it_points() -> None:
    assert Figure("at least", (1.0, 3.0), 2.0, at_least=True).parts_of_aim == (0.5, 1.5)
    assert Figure("at most", (1.0, 4.0, -1.0), 2.0).parts_of_aim == (2.0, 0.5)
    assert Figure("nothing wanted", (1.0,)).parts_of_aim == ()


def test_machines_are_named_shortly() -> None:
    assert machine_of({"cpu": "model name Intel(R) Xeon(R) Processor", "cores": 2}) == (
        "Intel Xeon, 2 cores"
    )


def test_every_kept_report_of_a_processor_is_in_the_table() -> None:
    figures, unread = summary.read(RESULTS)
    assert [name for name in unread if not name.startswith("gpu")] == []
    assert [one for one in figures if not (one.values and one.machine and one.commit)] == []


def test_reports_that_nobody_reads_are_named(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"x": 1}')
    row = serving("S", pagemesh=rounds(26, 10))
    (tmp_path / "serving.json").write_text(json.dumps({"rows": [row]}))
    figures, unread = summary.read(tmp_path)
    assert ([one.report for one in figures], unread) == (["serving"], ["other.json"])


def test_every_kind_of_step_has_an_aim() -> None:
    assert {case.name for case in bench_step.CASES} == set(aims.OF_FLOOR)


def test_without_matplotlib_a_line_says_that_there_is_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = summary.draw([Figure("one", (1.0,), 2.0)], tmp_path / "bench.png")
    assert said.startswith("no picture: matplotlib is not installed")
    assert not list(tmp_path.iterdir())


def test_the_picture_is_written_where_matplotlib_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "bench.png"
    assert str(path) in summary.draw([Figure("one", (1.0, 9.0), 2.0)], path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("in_process", "mesh", "figure", "verdict"),
    [
        (4.0, 6.5, "first token, ms over in process", "met"),
        (4.0, 7.5, "first token, ms over in process", "missed"),
        (100.0, 109.0, "first token over that in process", "met"),
        (100.0, 111.0, "first token over that in process", "missed"),
    ],
)
def test_a_hit_of_a_slow_model_may_take_a_tenth_longer_and_of_a_quick_one_milliseconds(
    in_process: float, mesh: float, figure: str, verdict: str
) -> None:
    first = {"mesh": mesh, "in_process": in_process, "over": mesh - in_process}
    found = {"cached_share_of_possible": 1.0, "first_token_ms": first}
    wanted = {"cached_share_of_possible": 0.99, "over_in_process_ms": 3.0}
    report = {"on": ON, "aims": wanted, "workloads": {"chat": found}}
    assert line_of(summary.as_text(figures_of("cache", report)), figure)[4] == verdict
