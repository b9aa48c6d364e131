"""The report as a picture: bars of output tokens a second, and of the time to the first text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.bench.serving.table import name_of

_MEASURES = (
    ("output_tokens_s", "output tokens/s, part of the fastest"),
    ("first_ms", "time to the first text, part of the longest"),
)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the picture; the suffix of ``path`` sets the format. Raises ``SystemExit`` without
    matplotlib.

    Rows differ by two orders of magnitude, so each is drawn relative to its own largest value.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib; install it: pip install matplotlib") from None
    names = list(dict.fromkeys(name for one in rows for name in one["servers"]))
    labels = [name_of(one) for one in rows]
    width = 0.8 / len(names)
    figure = Figure(figsize=(2.0 + 1.1 * len(rows), 7.0), layout="constrained")
    for place, (measure, title) in enumerate(_MEASURES):
        axes = figure.add_subplot(len(_MEASURES), 1, place + 1)
        longest = [max(_median(one, name, measure) for name in names) for one in rows]
        for index, name in enumerate(names):
            values = [_median(one, name, measure) for one in rows]
            bars = axes.bar(
                [at + index * width for at in range(len(rows))],
                [value / most for value, most in zip(values, longest, strict=True)],
                width,
                label=name,
            )
            axes.bar_label(bars, [f"{value:.0f}" if value else "" for value in values], fontsize=7)
        axes.set_title(title, fontsize=10)
        axes.set_xticks([at + 0.4 - width / 2 for at in range(len(rows))], labels, fontsize=8)
        axes.set_yticks([])
        axes.margins(y=0.12)
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def _median(row: Mapping[str, Any], name: str, measure: str) -> float:
    """The server's median; 0 if it was not measured."""
    found = row["servers"].get(name)
    return float(found["median"][measure]) if found else 0.0
