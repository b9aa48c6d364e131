"""The whole mesh on one GPU: is each token valid, do pages outlive processes, how fast is it?

Models have random weights and are made here; processes and HTTP are those of production. Tokens are
judged by the CPU's engine in float32: the logit of a greedy token, given all tokens before it, may
be below the highest one by at most ``gap_max`` times the largest absolute logit.
"""

from __future__ import annotations

import asyncio
import gc
import random
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from ops.bench.gpu_rig import PAGE_SIZE
from ops.bench.serving.load import Round, run_round
from ops.bench.serving.random_model import save
from ops.bench.serving.table import medians
from ops.bench.serving.workloads import WORKLOADS, Workload, words_of_model
from tests.integration.mesh import Mesh
from tests.unit.engine.harness import Pages, load_decoder, logits_of

from pagemesh.cli.benching.client import find_server

_PROMPT_COUNT = 6
_LENGTH_MAX = 300
_OUTPUT_TOKENS = 24
_REQUEST_S_MAX = 120.0
_ROUND_S_MAX = 120.0
_ROUNDS = 3
_POOL_BYTES = 4 << 30
_SMALL_POOL_BYTES = 128 << 20
"""5,800 tokens of M in bfloat16."""
_FLOOD_PROMPTS, _FLOOD_TOKENS = 16, 600

Tokens = tuple[int, ...]
Answers = list[tuple[Tokens, Tokens]]
"""Pairs of prompt and answer."""


@dataclass(frozen=True, slots=True)
class MeshCase:
    """The mesh to start. ``device`` may be ``interpreter``, to check that this benchmark works."""

    model: str
    dtype: str
    gap_max: float
    device: str = "cuda"
    kv_dtype: str = ""
    """Type of K and V in pages; ``dtype`` if empty."""
    pool_bytes: int = _POOL_BYTES
    output_tokens: int = _OUTPUT_TOKENS
    prompt_count: int = _PROMPT_COUNT
    host_bytes: int = 0
    """Size of a host tier; if there is one, prompts must also be restored from it."""
    prefill: int = 1
    """Prefill workers; with none, the decode worker does both."""
    workloads: Mapping[str, Workload] | None = None

    @property
    def name(self) -> str:
        pages = f" over {self.kv_dtype}" if self.kv_dtype else ""
        tier = " with a host tier" if self.host_bytes else ""
        workers = "" if self.prefill else " one worker"
        return f"mesh {self.model} {self.dtype}{pages}{tier}{workers}"


CASES = (
    MeshCase("M", "bfloat16", 0.03, prefill=0),
    MeshCase("M", "bfloat16", 0.03),
    MeshCase("M", "bfloat16", 0.03, kv_dtype="int8", prefill=0),
    MeshCase(
        "M", "bfloat16", 0.03, pool_bytes=_SMALL_POOL_BYTES, host_bytes=_POOL_BYTES, prefill=0,
        workloads={"chat": WORKLOADS["chat"]},
    ),
    MeshCase("L", "bfloat16", 0.03, prefill=0),
    MeshCase("M", "bfloat16", 0.03, kv_dtype="e4m3"),
    MeshCase("M", "float32", 1e-4),
    MeshCase("S", "float32", 1e-4),
    MeshCase("S", "bfloat16", 0.03, prefill=0),
)  # fmt: skip
"""The most informative cases first, should time run out."""
TRIAL = MeshCase(
    "S", "float32", 1e-4, "interpreter", pool_bytes=64 << 20, output_tokens=2, prompt_count=2,
    workloads={"one": Workload(1, 1, 0, 16, 0, 2, 1.0)},
)  # fmt: skip


def run_case(case: MeshCase, keep: Callable[[dict[str, Any]], None]) -> None:
    """Run a case. ``keep`` gets its line after each part, so that results are kept whatever happens
    to the rest. Raises what starting the mesh raises."""
    line: dict[str, Any] = {"item": case.name, "ok": True, "gap_max": case.gap_max}

    def part(name: str, work: Callable[[], object]) -> None:
        try:
            line[name] = work()
        except Exception as error:
            traceback.print_exc()
            line[name] = f"{type(error).__name__}: {error}"[:500]
            line["ok"] = False
        keep(line)

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / case.model
        save(case.model, model)
        with started(case, model) as mesh:
            line["start_s"] = round(mesh.start_seconds, 1)
            judge = Judge(model)
            prompts = _prompts(case, judge.vocab_tokens)

            def valid(
                after: Callable[[], object] = lambda: None, *, cached_min: int = 0
            ) -> dict[str, Any]:
                after()
                answers, cached = ask_all(mesh, model.name, prompts, case.output_tokens)
                gap = judge.worst_gap(answers)
                line["ok"] = line["ok"] and gap <= case.gap_max and cached >= cached_min
                return {"worst_gap": float(f"{gap:.2g}"), "cached_tokens": cached}

            part("computed", valid)
            # All whole pages of a prompt but that of its last token, which is always computed. A
            # mesh that lost its pages would give the same answers, but not from the cache.
            whole = sum((len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE for prompt in prompts)
            part("from the cache", lambda: valid(cached_min=whole))
            if case.host_bytes:
                flood = partial(_flood, mesh, model.name, judge.vocab_tokens)
                part("from the host", lambda: valid(flood, cached_min=PAGE_SIZE))
            for role in ("decode", "pager"):
                name = f"after the death of {'the pager' if role == 'pager' else role}"
                replaced = partial(_replace, mesh, role)
                part(name, lambda replaced=replaced: valid(replaced, cached_min=whole))  # type: ignore[misc]
            for name, workload in (case.workloads or WORKLOADS).items():
                part(name, lambda workload=workload: speed(mesh, model, workload))  # type: ignore[misc]
            part("idle again", lambda: mesh.wait_idle().free_pages)


@contextmanager
def started(case: MeshCase, model: Path) -> Iterator[Mesh]:
    """A mesh of the case that lives as long as the context."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        pool_dir = Path(folder) / "mesh"
        pool_dir.mkdir(mode=0o700)
        kv_dtype = case.kv_dtype or case.dtype
        tier = ("--host-bytes", str(case.host_bytes)) if case.host_bytes else ()
        types = ("--dtype", case.dtype, "--kv-dtype", kv_dtype)
        flags = ("--device", case.device, *types, *tier)
        with Mesh(
            pool_dir, model=model, prefill=case.prefill, pool_bytes=case.pool_bytes, flags=flags
        ) as mesh:
            yield mesh


def _replace(mesh: Mesh, role: str) -> None:
    old = mesh.kill(role)
    mesh.wait_for(lambda: mesh.pid(role) != old, f"a new {role}")
    mesh.wait_ready(90.0)


def _prompts(case: MeshCase, vocab_tokens: int) -> list[Tokens]:
    """Prompts, half of which share a prefix."""
    draw = random.Random(5)
    length_max = _LENGTH_MAX if case.device == "cuda" else 40
    stem = [draw.randrange(vocab_tokens) for _ in range(length_max // 2)]
    return [
        (*(stem if index % 2 else ()), *(draw.randrange(vocab_tokens) for _ in range(length)))
        for index, length in enumerate(
            draw.randrange(2, length_max // 2) for _ in range(case.prompt_count)
        )
    ]


def _flood(mesh: Mesh, model: str, vocab_tokens: int) -> None:
    """Send prompts that evict all others from a small pool."""
    draw = random.Random(6)
    prompts = [
        tuple(draw.randrange(vocab_tokens) for _ in range(_FLOOD_TOKENS))
        for _ in range(_FLOOD_PROMPTS)
    ]
    ask_all(mesh, model, prompts, 1)


def ask_all(
    mesh: Mesh, model: str, prompts: Sequence[Tokens], output_tokens: int
) -> tuple[Answers, int]:
    """Greedy answers to all prompts at once, and the number of cached prompt tokens. Raises
    ``RuntimeError`` for a refusal."""

    async def ask(client: httpx.AsyncClient, prompt: Tokens) -> tuple[tuple[Tokens, Tokens], int]:
        body = {
            "model": model, "prompt": list(prompt), "max_tokens": output_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        response = await client.post("/v1/completions", json=body)
        if response.status_code != httpx.codes.OK:
            raise RuntimeError(response.text[:300])
        found = response.json()
        cached = int(found["usage"]["prompt_tokens_details"]["cached_tokens"])
        return (prompt, tuple(found["choices"][0]["token_ids"])), cached

    async def run() -> list[tuple[tuple[Tokens, Tokens], int]]:
        limits = httpx.Timeout(_REQUEST_S_MAX)
        async with httpx.AsyncClient(base_url=mesh.url, timeout=limits) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    found = asyncio.run(run())
    return [answer for answer, _ in found], sum(cached for _, cached in found)


class Judge:
    """Judges tokens by the CPU's engine over the same weights."""

    def __init__(self, model: Path) -> None:
        self._decoder, self._pool = load_decoder(model, deterministic=False)
        self._known: dict[tuple[Tokens, Tokens], float] = {}

    @property
    def vocab_tokens(self) -> int:
        return self._decoder.config.vocab_tokens

    def worst_gap(self, answers: Answers) -> float:
        """The largest gap of a token's logit to the highest one, as a share of the largest absolute
        logit."""
        return max(self._gap(prompt, tokens) for prompt, tokens in answers)

    def _gap(self, prompt: Tokens, tokens: Tokens) -> float:
        asked = prompt, tokens
        if asked not in self._known:
            context = np.array((*prompt, *tokens[:-1]), np.uint32)
            table = Pages(self._pool).table(len(context))
            [logits] = logits_of(self._decoder, self._pool, [(table, context, 0)])
            own = logits[len(prompt) - 1 :]
            chosen = own.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            self._known[asked] = float((own.amax(-1) - chosen).max() / own.abs().max())
        return self._known[asked]


def speed(mesh: Mesh, model: Path, workload: Workload) -> dict[str, Any]:
    """Medians over rounds, each with new prompts, after an uncounted one in which kernels are
    compiled and graphs captured. Raises ``TimeoutError``."""
    server, words = find_server("pagemesh", mesh.url), words_of_model(model)

    async def run(seed: str) -> Round:
        async with asyncio.timeout(_ROUND_S_MAX):
            return await run_round(server, workload, words, seed)

    asyncio.run(run("warm-up"))
    # This process holds the judge's model: no round should wait for the collector to scan it.
    gc.collect()
    gc.disable()
    try:
        rounds = [asyncio.run(run(f"measured {number}")) for number in range(_ROUNDS)]
    finally:
        gc.enable()
    return {**medians(rounds), "cached_tokens": rounds[-1].cached_tokens}
