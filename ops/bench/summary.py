"""All stored figures in one table and one picture: the end of ``make bench``.

    python -m ops.bench.summary [--results FOLDER] [--picture FILE]

Reads the reports in FOLDER, whenever and wherever they were measured; each figure is shown with its
machine and commit (``+``: a changed tree). For several values with one aim, their range is shown
and how many met it. The picture shows each value relative to its aim: the aim is met from 1 to the
right. Without matplotlib there is no picture, and a line says so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ops.bench.figures import Figure, figures_of

_HEAD = ("benchmark", "figure", "measured", "aim", "", "machine", "commit")
_PART_MIN, _PART_MAX = 0.2, 5.0
"""The range of the picture, relative to an aim; values outside are drawn at its edge."""
_MET, _MISSED = "tab:blue", "tab:red"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("ops/bench/results"))
    parser.add_argument("--picture", type=Path, default=Path("ops/docs/images/bench.png"))
    options = parser.parse_args()
    figures, unread = read(options.results)
    print(as_text(figures))
    if unread:
        print(f"not in the table, as nobody reads them: {', '.join(unread)}")
    print(draw(figures, options.picture))


def read(folder: Path) -> tuple[list[Figure], list[str]]:
    """The figures of all reports in ``folder``, and the names of reports without any."""
    figures: list[Figure] = []
    unread: list[str] = []
    for path in sorted(folder.glob("*.json")):
        found = figures_of(path.stem, json.loads(path.read_text()))
        figures += found
        if not found:
            unread.append(path.name)
    return figures, unread


def as_text(figures: Sequence[Figure]) -> str:
    """A table with columns as wide as needed."""
    lines = [_HEAD, *map(_cells, figures)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cells(one: Figure) -> tuple[str, ...]:
    aim = "" if one.aim is None else f"{'>=' if one.at_least else '<='} {_number(one.aim)}"
    return one.report, one.name, _range(one.values), aim, _verdict(one), one.machine, one.commit


def _verdict(one: Figure) -> str:
    if one.aim is None:
        return ""
    if one.met_count == len(one.values):
        return "met"
    return f"{one.met_count} of {len(one.values)} met" if one.met_count else "missed"


def _range(values: Sequence[float]) -> str:
    low, high = _number(min(values)), _number(max(values))
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    """``value`` to three significant digits, or as an integer if that has more."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def draw(figures: Sequence[Figure], path: Path) -> str:
    """Write the picture to ``path``; returns a line about the result."""
    drawn = [one for one in figures if one.parts_of_aim]
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        return "no picture: matplotlib is not installed (pip install matplotlib)"
    if not drawn:
        return "no picture: no figure has an aim"
    canvas = Canvas(figsize=(11.0, 1.5 + 0.17 * len(drawn)), layout="constrained")
    axes = canvas.add_subplot()
    for place, one in enumerate(drawn):
        parts = [min(max(part, _PART_MIN), _PART_MAX) for part in one.parts_of_aim]
        colours = [_MET if part >= 1.0 else _MISSED for part in parts]
        axes.plot([min(parts), max(parts)], [place, place], color="0.8", linewidth=2.0, zorder=1)
        axes.scatter(parts, [place] * len(parts), c=colours, s=18, zorder=2)
    axes.axvline(1.0, color="0.3", linewidth=1.0)
    axes.set_xscale("log")
    ticks = (0.2, 0.33, 0.5, 0.75, 1.0, 1.33, 2.0, 3.0, 5.0)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_xlim(_PART_MIN / 1.05, _PART_MAX * 1.05)
    axes.set_yticks(range(len(drawn)), [f"{one.report}: {one.name}" for one in drawn], fontsize=6)
    axes.set_ylim(len(drawn) - 0.3, -0.7)
    axes.grid(axis="x", color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title("figures as parts of what is wanted: from 1 on the aim is met", fontsize=10)
    canvas.savefig(path, dpi=110)
    return f"the picture is {path}"


if __name__ == "__main__":
    main()
