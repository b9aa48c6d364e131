"""The figures in the stored reports, each with its aim and the machine it was measured on. Pure.

Every benchmark writes JSON of its own shape, so each has a reader here, selected by the prefix of
the file's name. Values with the same name and aim form one figure: those of several models, batches
or conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ops.bench import aims
from ops.bench.serving import table

Report = Mapping[str, Any]
Values = Iterable[float]
_PEERS = frozenset({"llama.cpp", "vllm", "transformers"})
"""The peers to be faster than. Other columns of a serving report are pagemesh in another set-up."""
_DESCRIPTIONS = ("on", "machine", "hardware")
"""Fields in which a report may describe the machine; otherwise the description is at the top."""


@dataclass(frozen=True, slots=True)
class Figure:
    """``values`` of one quantity; ``aim`` is their maximum, or minimum if ``at_least``; None if
    there is no aim."""

    name: str
    values: tuple[float, ...]
    aim: float | None = None
    at_least: bool = False
    report: str = ""
    machine: str = ""
    commit: str = ""

    @property
    def met_count(self) -> int:
        """How many values meet the aim; 0 if there is none."""
        if self.aim is None:
            return 0
        return sum(v >= self.aim if self.at_least else v <= self.aim for v in self.values)

    @property
    def parts_of_aim(self) -> tuple[float, ...]:
        """Each value relative to the aim, at least 1 if it is met; empty if there is no ratio."""
        if not self.aim:
            return ()
        if self.at_least:
            return tuple(value / self.aim for value in self.values)
        return tuple(self.aim / value for value in self.values if value > 0)


def figures_of(name: str, report: Report) -> list[Figure]:
    """The figures of the report in file ``name`` (without suffix); empty if it has no reader."""
    reader = _reader_of(name)
    return [] if reader is None else [replace(one, report=name) for one in reader(report)]


def _reader_of(name: str) -> Callable[[Report], Iterator[Figure]] | None:
    known = [begin for begin in _READERS if name == begin or name.startswith(f"{begin}_")]
    return _READERS[max(known, key=len)] if known else None


def machine_of(on: Report) -> str:
    """Processor and cores, in a short form that still distinguishes machines."""
    cpu = str(on.get("cpu", "")).removeprefix("model name ").replace("(R)", "")
    words = [word for word in cpu.split() if word != "Processor"]
    if on.get("backend"):
        words.append(str(on["backend"]).rsplit("-", 1)[-1])
    cores = on.get("cores")
    return " ".join(words) + (f", {cores} cores" if cores else "")


def _figure(name: str, values: Values, on: Report | Iterable[Report], **aim: Any) -> Figure:
    """A figure; ``on`` describes the machine of all values, or that of each."""
    places = [on] if isinstance(on, Mapping) else list(on)
    return Figure(
        name,
        tuple(values),
        machine="; ".join(dict.fromkeys(map(machine_of, places))),
        commit=", ".join(dict.fromkeys(str(one.get("commit", "")) for one in places)),
        **aim,
    )


def _at_least(aim: float | None) -> dict[str, Any]:
    return {} if aim is None else {"aim": aim, "at_least": True}


def _on(report: Report) -> Report:
    for name in _DESCRIPTIONS:
        if isinstance(report.get(name), Mapping):
            found: Report = report[name]
            return found
    return report


def _grouped(rows: Iterable[Report], *names: str) -> Iterator[tuple[tuple[str, ...], list[Report]]]:
    """Groups of rows with the same values of ``names``, in order of first occurrence."""
    groups: dict[tuple[str, ...], list[Report]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row.get(name, "")) for name in names), []).append(row)
    yield from groups.items()


# Engine ------------------------------------------------------------------------------------------


def _serving(report: Report) -> Iterator[Figure]:
    rows = report["rows"]
    for row in rows:
        name, found = table.name_of(row), row.get("speed")
        if found is None:
            speed = row["servers"][table.OURS]["median"]["output_tokens_s"]
            yield _figure(f"{name}: tokens/s", [speed], row["on"])
            continue
        wanted = found["aim"] if found["peer"] in _PEERS else None
        title = f"{name}: tokens/s over {found['peer']}'s"
        yield _figure(title, [found["ratio"]], row["on"], **_at_least(wanted))
    for (model,), group in _grouped((row for row in rows if "first" in row), "model"):
        known = all(row["first"]["peer"] in _PEERS for row in group)
        yield _figure(
            f"{model}: first text over the soonest peer's",
            [row["first"]["ratio"] for row in group],
            [row["on"] for row in group],
            aim=1.0 if known else None,
        )


def _step(report: Report) -> Iterator[Figure]:
    for (case, weights, rows_type), rows in _grouped(report["results"], "case", "weights", "rows"):
        plain = weights == "float32" and rows_type in ("", "float32")
        types = weights + (f" x {rows_type}" if rows_type else "")
        yield _figure(
            f"{case}, {types}: of the floor",
            [row["of_floor_median"] for row in rows],
            [row["on"] for row in rows],
            **_at_least(aims.OF_FLOOR.get(case) if plain else None),
        )


def _share(report: Report) -> Iterator[Figure]:
    for row in report["rows"]:
        aim = aims.OUTSIDE_STEPS.get(row["model"].split(",")[0])
        name = f"{row['model']}, {row['workload']}: of a step outside native code"
        yield _figure(name, [row["outside"]], row["on"], aim=aim)


def _start(report: Report) -> Iterator[Figure]:
    for row in report["rows"]:
        for kind in ("cold", "prepared"):
            yield _figure(
                f"{row['model']}: s to the ready line, {kind}", [row["ready_s"][kind]], row["on"]
            )
        total = sum(one["other_mb"] for one in row["memory"].values())
        yield _figure(f"{row['model']}: MB of all processes, pool apart", [total], row["on"])


def _attention(report: Report) -> Iterator[Figure]:
    for (dtype,), rows in _grouped(report["results"], "kv_dtype"):
        if dtype == "float32":
            values = [row["of_stream"] for row in rows]
            yield _figure(f"{dtype}: of a stream", values, report, **_at_least(aims.OF_STREAM))
        else:
            values = [row["over_float32"] for row in rows]
            aim = _at_least(aims.OVER_FLOAT32.get(dtype))
            yield _figure(f"{dtype}: times as fast as float32", values, report, **aim)


def _kernels(report: Report) -> Iterator[Figure]:
    for row in report["results"]:
        if row["kernel"] == "attention" and row["context_tokens"] == 8192:
            name = f"attention, {row['queries_per_kv_head']} queries a KV head: of a stream"
            yield _figure(name, [row["of_roofline"]], report, **_at_least(aims.OF_STREAM))
    products = [row["of_roofline"] for row in report["results"] if row["kernel"] == "linear"]
    yield _figure("matrix products, 1 to 512 rows: of the floor", products, report)


def _tiles(report: Report) -> Iterator[Figure]:
    for (model,), rows in _grouped(report["results"], "model"):
        yield _figure(
            f"{model}: time with --deterministic over that without",
            [row["deterministic_ms"] / row["tiles_ms"] for row in rows],
            [row["on"] for row in rows],
            aim=aims.DETERMINISTIC_SLOWDOWN,
        )


def _slim(report: Report) -> Iterator[Figure]:
    rows = "rounded rows" if report.get("is_rounded") else "rows"
    model = ", ".join([report["model"], *([report["level"]] if "level" in report else [])])
    name = f"{model}, bfloat16 in twelve bits, 1 to 128 {rows}: time over that in sixteen"
    yield _figure(name, [row["ratio"] for row in report["results"]], report["on"])


def _latency(report: Report) -> Iterator[Figure]:
    for row in report["rows"]:
        name = f"{row['model']}, {row['setup']}: p99 ms between chunks under load"
        yield _figure(name, [row["load_itl"]["p99"]], row["on"], aim=row["aim_p99"])


def _drafts(report: Report) -> Iterator[Figure]:
    for (model, text), rows in _grouped(report["rows"], "model", "text"):
        name = f"{model}, text that is {text}: tokens/s over those without"
        yield _figure(name, [row["ratio"] for row in rows], report["on"])


def _sampling(report: Report) -> Iterator[Figure]:
    names = dict.fromkeys(name for row in report["results"] for name in row if "_over_" in name)
    for name in names:
        values = [row[name] for row in report["results"] if name in row]
        yield _figure(f"{name.replace('_', ' ')}, time", values, report)


def _layout(report: Report) -> Iterator[Figure]:
    for (variant,), rows in _grouped(report["results"], "variant"):
        yield _figure(f"{variant}: of a stream", [row["attend_of_stream"] for row in rows], report)


def _gpu(report: Report) -> Iterator[Figure]:
    """Figures of one GPU, whose name stands for the machine."""
    on = {"cpu": report["device"], "commit": report.get("commit", "")}
    lines = [line for line in report["results"] if line["ok"]]
    beside = [line for line in lines if line.get("torch_ms")]
    for kind, title in (
        ("decode attention", "decode attention, times as fast as torch's"),
        ("prefill attention", "prefill attention, times as fast as torch's"),
        ("decode step", "decode steps, times as fast as without graphs"),
        ("step of", "steps with prompts, times as fast as without graphs"),
    ):
        own = [line for line in beside if line["item"].startswith(kind)]
        if own:
            yield _figure(title, [line["torch_ms"] / line["ms"] for line in own], on)
    for line in lines:
        parts = [part for part in line.values() if isinstance(part, Mapping)]
        rounds = [part for part in parts if "first_ms" in part]
        if rounds:
            yield _figure(f"{line['item']}: first text, ms", [r["first_ms"] for r in rounds], on)
            speeds = [r["output_tokens_s"] for r in rounds]
            yield _figure(f"{line['item']}: tokens/s", speeds, on)


def _gpu_tiles(report: Report) -> Iterator[Figure]:
    on = {"cpu": report["device"], "commit": report.get("commit", "")}
    times = [line["tiles"][0]["ms"] / line["own"]["ms"] for line in report["results"]]
    yield _figure("attention on the fastest tiles over those of then", times, on)


# Pager and mesh ----------------------------------------------------------------------------------


def _pager(report: Report) -> Iterator[Figure]:
    on, wanted = _on(report), report.get("aims", {})
    for kind, loads in report.get("results", {}).items():
        times = {load: found["p50_us"] for load, found in loads.items() if load != "machine"}
        aim = wanted.get("p50_us", {}).get(kind)
        short = times.pop("short", None)
        yield _figure(f"{kind}: p50 us for 8,192 tokens", times.values(), on, aim=aim)
        if short is not None:
            yield _figure(f"{kind}: p50 us for 1,024 tokens", [short], on)
    if "index_bytes_a_cached_page" in report:
        values = list(report["index_bytes_a_cached_page"].values())
        yield _figure("bytes a cached page", values, on, aim=wanted.get("bytes_a_cached_page"))


def _pager_beside(report: Report) -> Iterator[Figure]:
    for peer, ratios in report["median_ratio_of_pagemesh"].items():
        yield _figure(f"time over {peer}'s, cold and hot", ratios.values(), report["on"])


def _pager_bus(report: Report) -> Iterator[Figure]:
    values = [row["admits_per_second"] for row in report["results"]]
    yield _figure(
        "admissions a second", values, report["on"], **_at_least(report["aim_per_second"])
    )


def _pager_trace(report: Report) -> Iterator[Figure]:
    for kind, found in report["results"].items():
        tokens = f"{found['mean_prompt_tokens']:,.0f}"
        yield _figure(f"{kind}: p50 us for {tokens} tokens", [found["p50_us"]], report["on"])


def _pager_turns(report: Report) -> Iterator[Figure]:
    values = [found["summary"]["after"]["p50_ratio"] for found in report["results"].values()]
    yield _figure(f"p50 over that of {report['before']}", values, report["on"])


def _invalidate(report: Report) -> Iterator[Figure]:
    longest = max(report["turn_ms_max"], report["call_ms"])
    yield _figure("longest turn, ms", [longest], _on(report))


def _recovery(report: Report) -> Iterator[Figure]:
    values = [
        found["total_s"] / found["cached_pages"] * 1e6 for found in report["results"].values()
    ]
    yield _figure("s a million pages", values, _on(report), aim=report["aim_s_per_million"])


def _eviction(report: Report) -> Iterator[Figure]:
    values = [line["more_hits"] for line in report["aims"]]
    yield _figure("hits beyond LRU's, of the blocks", values, _on(report), **_at_least(0.0))


def _waste(report: Report) -> Iterator[Figure]:
    values = [found["total"] for found in report["shares"].values()]
    yield _figure("slots in use without a token", values, _on(report), aim=report["aim"])


def _tiers(report: Report) -> Iterator[Figure]:
    for name, found in report["core"].items():
        yield _figure(f"{name}: time over that without a disk", [found["ratio"]], _on(report))


def _cache(report: Report) -> Iterator[Figure]:
    found, wanted, on = report["workloads"].values(), report["aims"], _on(report)
    shares = [one["cached_share_of_possible"] for one in found]
    aim = _at_least(wanted["cached_share_of_possible"])
    yield _figure("cached, of what is possible", shares, on, **aim)
    firsts = [one["first_token_ms"] for one in found]
    if all(aims.is_slow(one["in_process"], wanted["over_in_process_ms"]) for one in firsts):
        ratios = [one["mesh"] / one["in_process"] for one in firsts]
        yield _figure("first token over that in process", ratios, on, aim=aims.OVER_IN_PROCESS)
        return
    over = [one["over"] for one in firsts]
    yield _figure("first token, ms over in process", over, on, aim=wanted["over_in_process_ms"])


def _mesh_tax(report: Report) -> Iterator[Figure]:
    for name, aim in report["aims"].items():
        yield _figure(f"tax, {name}", [report["tax"][name]["p50"]], _on(report), aim=aim)


def _overhead(report: Report) -> Iterator[Figure]:
    for name, aim in report["aims"].items():
        yield _figure(name.replace("_", " "), [report[name]], _on(report), aim=aim)


def _bus(report: Report) -> Iterator[Figure]:
    yield _figure("request over nats-py's, p50", [report["bus_over_nats_py"]], _on(report))


_READERS: Mapping[str, Callable[[Report], Iterator[Figure]]] = {
    "attention": _attention,
    "bus": _bus,
    "cache": _cache,
    "disaggregate": _serving,
    "drafts": _drafts,
    "eviction": _eviction,
    "gpu": _gpu,
    "gpu_tiles": _gpu_tiles,
    "invalidate": _invalidate,
    "kernels": _kernels,
    "latency": _latency,
    "layout": _layout,
    "mesh_tax": _mesh_tax,
    "overhead": _overhead,
    "pager": _pager,
    "pager_beside": _pager_beside,
    "pager_bus": _pager_bus,
    "pager_trace": _pager_trace,
    "pager_turns": _pager_turns,
    "recovery": _recovery,
    "runs": _serving,
    "sampling": _sampling,
    "serving": _serving,
    "share": _share,
    "slim": _slim,
    "start": _start,
    "step": _step,
    "stream": _serving,
    "tiers": _tiers,
    "tiles": _tiles,
    "waste": _waste,
}
