"""Medians over rounds, ratios to the best peer, and how they compare with the aims. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ops.bench.aims import SPEED_OF_MODEL
from ops.bench.serving.load import Round
from ops.bench.serving.workloads import WORKLOADS

OURS = "pagemesh"
_SIZES = ("S", "M", "L")
_MEDIANS = ("output_tokens_s", "first_ms", "gap_ms", "gap_p99_ms", "token_ms", "wall_s")


def medians(rounds: Sequence[Round]) -> dict[str, float]:
    return {
        name: round(statistics.median(getattr(one, name) for one in rounds), 3) for name in _MEDIANS
    }


def row(
    model: str, workload: str, rounds: Mapping[str, Sequence[Round]], floors: Sequence[float]
) -> dict[str, Any]:
    """A workload's line of the report: each server's medians and rounds, in the order of
    ``rounds``, and with peers the ratios of ours to the best of them in speed and in time to first
    text. ``floors``: output tokens a second that the machine would have allowed, one per
    measurement of it. The aim's ``of_floor`` is the share of the floor at which the aim, a multiple
    of the best peer's speed, would be met."""
    servers: dict[str, dict[str, Any]] = {
        name: {"median": medians(ran), "rounds": [one.as_json() for one in ran]}
        for name, ran in rounds.items()
    }
    peers = [name for name in rounds if name != OURS]
    line: dict[str, Any] = {"model": model, "workload": workload, "servers": servers}
    allowed = statistics.median(floors)
    speed = {name: server["median"]["output_tokens_s"] for name, server in servers.items()}
    line["floor"] = {
        "output_tokens_s": round(allowed, 1),
        "rounds": [round(one, 1) for one in floors],
        "of_floor": {name: round(speed[name] / allowed, 3) for name in servers},
    }
    if OURS not in rounds or not peers:
        return line
    fastest = max(peers, key=lambda name: speed[name])
    soonest = min(peers, key=lambda name: servers[name]["median"]["first_ms"])
    speeds = _ratios(rounds[OURS], rounds[fastest], "output_tokens_s")
    firsts = _ratios(rounds[OURS], rounds[soonest], "first_ms")
    aim = speed_aim(model, workload)
    line["floor"]["of_floor"]["aim"] = round(aim * speed[fastest] / allowed, 3)
    return line | {
        "speed": {"peer": fastest, "aim": aim, **speeds},
        "first": {"peer": soonest, "aim": 1.0, **firsts},
    }


def speed_aim(model: str, workload: str) -> float:
    """The aim, as a multiple of the best peer's tokens a second. ``model`` is a label that begins
    with the model's name."""
    return SPEED_OF_MODEL.get(model.split(",")[0], WORKLOADS[workload].speed_aim)


def _ratios(ours: Sequence[Round], theirs: Sequence[Round], name: str) -> dict[str, float]:
    """Ratios of paired rounds: other load on the machine affects neighbours alike."""
    found = [getattr(a, name) / getattr(b, name) for a, b in zip(ours, theirs, strict=True)]
    return {
        "ratio": round(statistics.median(found), 3),
        "ratio_min": round(min(found), 3),
        "ratio_max": round(max(found), 3),
    }


def merged(report: Mapping[str, Any], lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of ``report``, in which ``lines`` replace those of the same model, set-up and
    workload: long workloads are measured one at a time. A measurement without peers is a row of its
    own, and does not replace a comparison."""
    rows = {_place(line): line for line in [*report.get("rows", ()), *lines]}
    return [rows[place] for place in sorted(rows)]


def _place(line: Mapping[str, Any]) -> tuple[int, str, bool, int]:
    model, workload = line["model"], line["workload"]
    size = _SIZES.index(model) if model in _SIZES else len(_SIZES)
    return size, model, is_alone(line), list(WORKLOADS).index(workload)


def is_alone(line: Mapping[str, Any]) -> bool:
    """Whether the row has no peers."""
    return len(line["servers"]) == 1


def name_of(line: Mapping[str, Any]) -> str:
    """The name of a row: the model with its set-up, and the workload."""
    return f"{line['model']}{', alone' * is_alone(line)} {line['workload']}"


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table: output tokens a second, ms to the first text, ms per token of each
    server."""
    names = list(dict.fromkeys(name for one in rows for name in one["servers"]))
    head = ["", *(f"{name}: tok/s, first ms, ms a token" for name in names)]
    lines = [[*head, "speed / best peer (aim)", "first / best peer", "of the floor (aim)"]]
    for one in rows:
        cells = [name_of(one)]
        for name in names:
            found = one["servers"].get(name, {}).get("median")
            cells.append(
                f"{found['output_tokens_s']:.1f}, {found['first_ms']:.0f}, {found['token_ms']:.1f}"
                if found
                else "-"
            )
        cells += [_verdict(one.get("speed"), higher=True), _verdict(one.get("first"), higher=False)]
        cells.append(_part_of_floor(one.get("floor")))
        lines.append(cells)
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _verdict(found: Mapping[str, Any] | None, *, higher: bool) -> str:
    if found is None:
        return "-"
    met = found["ratio"] >= found["aim"] if higher else found["ratio"] <= found["aim"]
    return f"{found['ratio']:.2f} ({found['aim']:g}{'' if met else ', missed'}), {found['peer']}"


def _part_of_floor(found: Mapping[str, Any] | None) -> str:
    if found is None or OURS not in found["of_floor"]:
        return "-"
    parts = found["of_floor"]
    return f"{parts[OURS]:.2f}" + (f" ({parts['aim']:.2f})" if "aim" in parts else "")
