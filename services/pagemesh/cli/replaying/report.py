"""Hit rates by policy and capacity: as text, as JSON, as a plot."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagemesh.cli.main import WRITE_ERRORS
from pagemesh.cli.replaying.trace import Trace
from pagemesh.wire.errors import ConfigError

PLOT_ENDINGS = (".png", ".svg", ".pdf", ".eps", ".jpg", ".jpeg", ".webp")


@dataclass(frozen=True, slots=True)
class Scores:
    """Hit rates from 0 to 1. ``rates``: policy -> one for each capacity, like ``optimum``."""

    capacities: tuple[int, ...]
    rates: dict[str, tuple[float, ...]]
    optimum: tuple[float, ...]
    unbounded: float


def text_report(trace: Trace, scores: Scores, *, cold: bool) -> str:
    """A table, followed by an explanation of the optimum."""
    count, first = len(trace.prompts), trace.scored_from
    scored = "all of them" if not first else f"the last {count - first:,}"
    start = "an empty cache" if cold or not first else "the cache that those before it left"
    lines = [
        f"{trace.name}: {count:,} requests, {trace.block_count:,} different blocks; scored: "
        f"{scored}, {trace.scored_blocks:,} blocks, from {start}",
        "",
        _row("blocks of cache", [f"{capacity:,}" for capacity in scores.capacities]),
    ]
    for policy, rates in scores.rates.items():
        shares = [_share(rate, best) for rate, best in zip(rates, scores.optimum, strict=True)]
        lines.append(_row(policy, [f"{rate:.4f}" for rate in rates]))
        lines.append(_row("  of the optimum", [f"{share:.1%}" for share in shares]))
    lines.append(_row("optimum", [f"{rate:.4f}" for rate in scores.optimum]))
    lines += [
        _row("no limit", [f"{scores.unbounded:.4f}"] * len(scores.capacities)),
        "",
        "optimum: Belady's rule with bypass, knowing every request to come. No cache hits more,",
        "whether or not it must keep prefixes whole; it needs no room for the prompt being served.",
    ]
    return "\n".join(lines)


def json_report(trace: Trace, scores: Scores, *, cold: bool) -> dict[str, Any]:
    """Every number; rates from 0 to 1."""
    return {
        "trace": trace.name,
        "requests": len(trace.prompts),
        "scored_requests": len(trace.prompts) - trace.scored_from,
        "scored_blocks": trace.scored_blocks,
        "cold": cold or not trace.scored_from,
        "capacities": list(scores.capacities),
        "hit_rates": {policy: list(rates) for policy, rates in scores.rates.items()},
        "optimum": list(scores.optimum),
        "unbounded": scores.unbounded,
    }


def check_plot(path: Path) -> None:
    """Raises ``ConfigError`` when no plot can be written to ``path``; called before the replay,
    which may take long."""
    if path.suffix.lower() not in PLOT_ENDINGS:
        endings = ", ".join(PLOT_ENDINGS)
        raise ConfigError(f"--plot {path}: give it an ending that can be drawn: {endings}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it: pip install matplotlib")
    if not os.path.isdir(path.parent):
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}; create it first")
    existing = path if os.path.exists(path) else path.parent  # a Path would raise for long names
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"--plot {path}: {existing} cannot be written; name another file")


def save_plot(path: Path, trace: Trace, scores: Scores) -> None:
    """Draw hit rates over capacity; the suffix of ``path`` sets the format. Raises
    ``ConfigError``, or ``OSError`` with one of ``WRITE_ERRORS``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for policy, rates in scores.rates.items():
        axes.plot(scores.capacities, rates, marker="o", label=policy)
    axes.plot(scores.capacities, scores.optimum, "k--", marker=".", label="optimum")
    axes.axhline(scores.unbounded, color="grey", linestyle=":", label="no limit")
    axes.set(xscale="log", xlabel="blocks of cache", ylabel="hit rate", title=trace.name)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in WRITE_ERRORS:
            error.filename = str(path)
            raise
        raise ConfigError(f"--plot {path}: {error}") from None


def _share(rate: float, best: float) -> float:
    return rate / best if best else 1.0


def _row(title: str, cells: list[str]) -> str:
    return f"{title:<18}" + "".join(f"{cell:>10}" for cell in cells)
