"""The gain of drafts: the same requests with and without them, in turns.

    python -m ops.bench.bench_drafts [--models S M] [--at-once 1 8] [--rounds N] [--out PATH]

A model with random weights imitates three kinds of text. Greedy sampling soon repeats itself, so
that nearly every draft is right; sampling from the two likeliest tokens at a temperature returns to
earlier text and leaves it again; sampling from all tokens never does, and nothing is drafted.
Prompts are new in each round; both meshes get the same ones, and their texts must be equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# isort: off
import ops.bench.as_workers  # noqa: F401  (before torch)

# isort: on
import uvloop
from ops.bench.hardware import describe
from ops.bench.no_drafts import NO_DRAFTS
from ops.bench.serving.random_model import save
from tests.integration.mesh import Mesh

from pagemesh.cli.benching.client import Reply, Server, complete, find_server

TEXTS: Mapping[str, Mapping[str, Any]] = {
    "repeats": {"temperature": 0},
    "partly": {"temperature": 0.5, "top_k": 2},
    "new": {"temperature": 1},
}
WORDS = range(1_000, 9_000)
"""Token ids in the vocabulary of every model."""
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128
_POOL_BYTES = 1 << 30
_SETTLE_S = 0.5


async def tokens_s(
    server: Server, prompts: list[list[int]], draw: Mapping[str, Any]
) -> tuple[float, list[str]]:
    replies: list[Reply] = await asyncio.gather(*(
        complete(server, prompt, OUTPUT_TOKENS, {**draw, "seed": seed})
        for seed, prompt in enumerate(prompts)
    ))  # fmt: skip
    took_s = max(one.ended_s for one in replies) - min(one.sent_s for one in replies)
    return OUTPUT_TOKENS * len(replies) / took_s, [one.text for one in replies]


async def compare(
    servers: Sequence[Server], text: str, at_once: int, rounds: int
) -> dict[str, Any]:
    """Compare two ``servers``: the first without drafts, the second with them."""
    dice = random.Random(f"{text} {at_once}")
    found: dict[str, list[float]] = {"without": [], "with": []}
    for turn in range(rounds + 1):  # the first one warms up
        prompts = [dice.choices(WORDS, k=PROMPT_TOKENS) for _ in range(at_once)]
        order = list(zip(found, servers, strict=True))
        texts = []
        for name, server in order if turn % 2 else order[::-1]:
            speed, said = await tokens_s(server, prompts, TEXTS[text])
            texts.append(said)
            if turn:
                found[name].append(speed)
            await asyncio.sleep(_SETTLE_S)
        if texts[0] != texts[1]:
            raise SystemExit(f"{text}, {at_once} at once: drafts changed what was said")
    pairs = zip(found["with"], found["without"], strict=True)
    return {
        "text": text,
        "at_once": at_once,
        **{f"{name}_tokens_s": round(statistics.median(own), 1) for name, own in found.items()},
        "ratios": sorted(round(ours / theirs, 3) for ours, theirs in pairs),
    }


def bench(model: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    save(model, folder / model)
    rows = []
    pools = [folder / f"{model}-{name}" for name in ("without", "with")]
    for pool in pools:
        pool.mkdir()
    with (
        Mesh(pools[0], model=folder / model, pool_bytes=_POOL_BYTES, env=NO_DRAFTS) as plain,
        Mesh(pools[1], model=folder / model, pool_bytes=_POOL_BYTES) as drafting,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        servers = [find_server("pagemesh", mesh.url) for mesh in (plain, drafting)]
        for at_once in options.at_once:
            for text in TEXTS:
                row = runner.run(compare(servers, text, at_once, options.rounds))
                row |= {"model": model, "ratio": statistics.median(row["ratios"])}
                print(
                    f"{model} {at_once} at once, {text}: {row['without_tokens_s']} tok/s without, "
                    f"{row['with_tokens_s']} with drafts, {row['ratio']:.2f} times",
                    flush=True,
                )
                rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["S", "M"], choices=["S", "M", "L"])
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 4, 8, 24])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("ops/bench/results/drafts.json"))
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for model in options.models:
            rows += bench(model, Path(folder), options)
    report = {"benchmark": "drafts", "rows": rows, "on": describe()}
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
