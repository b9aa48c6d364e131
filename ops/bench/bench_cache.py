"""Is everything cached that could be, and what does a hit cost? Measured over HTTP.

    python -m ops.bench.bench_cache [--model DIR] [--out ops/bench/results/cache.json]

Four workloads, generated from a seed, are sent to a whole mesh, one request after the other:

    document   one document of 4,000 tokens, 20 questions
    chat       4 talks of 4 turns each, as messages
    few-shot   1,000 tokens of examples, 20 queries
    agent      2 runs of 8 steps: everything so far, the answer, and a tool's result

*Possible* is the longest prefix of full pages that earlier requests have computed, without the page
of the prompt's last token, which is always computed. The last token of an answer counts as not
computed. The time to first token of each hit is compared, in turns, with that of the worker loop in
process, without a mesh, for the same prompt over the same cached tokens. Before each, a short
request of the same kind is sent (a chat before chats). ``--pause-ms`` adds a pause before each:
when a client gets its last token, the mesh is still releasing pages and counting, and people do not
ask again within that millisecond.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ops.bench.aims import OVER_IN_PROCESS, is_slow, of_aim
from ops.bench.hardware import describe
from ops.bench.no_drafts import NO_DRAFTS
from ops.bench.stream import Connection
from ops.demo_model import stories
from tests.integration.mesh import Mesh

from pagemesh.cli.benching.timed_stream import events_of
from pagemesh.runtime.model_folder import find_model

if TYPE_CHECKING:
    from ops.bench.in_process import InProcess

PAGE_TOKENS = 16
IDS = 2_000
"""Prompts of token ids use ids below this."""
AIM_SHARE, AIM_MS = 0.99, 3.0

Body = dict[str, Any]

WARM: Body = {"prompt": [1] * 8, "max_tokens": 1}
WARM_CHAT: Body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
"""Sent before a measured chat, which takes another path through the gateway than token ids."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer, and the milliseconds until its first token."""

    prompt: list[int]
    tokens: list[int]
    text: str
    cached_tokens: int
    first_ms: float


Workload = Generator[Body, Answer, None]


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(IDS) for _ in range(count)]


def document(draw: random.Random) -> Workload:
    text = _ids(draw, 4_000)
    for _ in range(20):
        yield {"prompt": text + _ids(draw, draw.randint(16, 64)), "max_tokens": 16}


def chat(draw: random.Random) -> Workload:
    for _ in range(4):
        talk: list[dict[str, str]] = []
        for _ in range(4):
            talk.append({"role": "user", "content": stories.story(draw)})
            answer = yield {"messages": list(talk), "max_tokens": 48}
            talk.append({"role": "assistant", "content": answer.text})


def few_shot(draw: random.Random) -> Workload:
    examples = _ids(draw, 1_000)
    for _ in range(20):
        yield {"prompt": examples + _ids(draw, draw.randint(20, 60)), "max_tokens": 8}


def agent(draw: random.Random) -> Workload:
    for _ in range(2):
        prompt = _ids(draw, 800)
        for _ in range(8):
            answer = yield {"prompt": prompt, "max_tokens": 24}
            prompt = prompt + answer.tokens + _ids(draw, draw.randint(60, 240))


WORKLOADS: dict[str, Callable[[random.Random], Workload]] = {
    "document": document, "chat": chat, "few-shot": few_shot, "agent": agent,
}  # fmt: skip


def ask(connection: Connection, body: Body) -> Answer:
    """Send ``body`` and read the answer; an event is timed by the arrival of its end. Raises
    ``RuntimeError`` with any other answer."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    pieces = connection.ask(path, body | {"stream_options": {"include_usage": True}})
    prompt: list[int] = body.get("prompt", [])
    tokens: list[int] = []
    text, cached_tokens, first_ms = "", 0, 0.0
    for at_s, event in events_of(pieces):
        prompt = prompt or event.get("prompt_token_ids") or []
        if event.get("usage"):
            cached_tokens = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        for choice in event["choices"]:
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            tokens += choice.get("token_ids") or []
            first_ms = first_ms or (1e3 * at_s if tokens else 0.0)
    return Answer(prompt, tokens, text, cached_tokens, first_ms)


@dataclass(slots=True)
class Computed:
    """The prefixes of full pages whose K and V were computed."""

    prefixes: set[tuple[int, ...]] = field(default_factory=set)

    def possible(self, prompt: list[int]) -> int:
        """How many tokens of ``prompt`` could be cached."""
        end = 0
        while end + PAGE_TOKENS < len(prompt) and tuple(prompt[: end + PAGE_TOKENS]) in (
            self.prefixes
        ):
            end += PAGE_TOKENS
        return end

    def add(self, tokens: list[int]) -> None:
        for end in range(PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS):
            self.prefixes.add(tuple(tokens[:end]))


@dataclass(slots=True)
class Figures:
    """The figures of one workload."""

    requests: int = 0
    prompt_tokens: int = 0
    possible_tokens: int = 0
    cached_tokens: int = 0
    short: list[tuple[int, int, int]] = field(default_factory=list)
    """(request, possible tokens, cached tokens) of requests with fewer cached than possible."""
    hit_ms: list[float] = field(default_factory=list)
    own_ms: list[float] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        mesh_ms, own_ms = statistics.median(self.hit_ms), statistics.median(self.own_ms)
        quarters = [statistics.quantiles(times, n=4)[0] for times in (self.hit_ms, self.own_ms)]
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "possible_tokens": self.possible_tokens,
            "cached_share_of_possible": self.cached_tokens / self.possible_tokens,
            "short_of_possible": self.short,
            "hits": len(self.hit_ms),
            "first_token_ms": {"mesh": mesh_ms, "in_process": own_ms, "over": mesh_ms - own_ms},
            "quickest_quarter_ms": {"mesh": quarters[0], "in_process": quarters[1]},
        }


def play(
    workload: Workload, connection: Connection, own: InProcess, figures: Figures, pause_s: float
) -> None:
    """Run ``workload`` on the mesh and in process, and add the results to ``figures``."""
    computed = Computed()
    body = next(workload)
    while True:
        warm = WARM_CHAT if "messages" in body else WARM
        ask(connection, warm)
        time.sleep(pause_s)
        answer = ask(connection, body)
        possible = computed.possible(answer.prompt)
        computed.add((answer.prompt + answer.tokens)[:-1])
        figures.requests += 1
        figures.prompt_tokens += len(answer.prompt)
        figures.possible_tokens += possible
        figures.cached_tokens += answer.cached_tokens
        if answer.cached_tokens < possible:
            figures.short.append((figures.requests, possible, answer.cached_tokens))
        if possible:
            own.generate(answer.prompt[: possible + 1], 1)  # cache the same tokens in process
            ask(connection, warm)  # as before the mesh's: processor caches are shared
            own.generate(WARM["prompt"], 1)
            time.sleep(pause_s)
            figures.hit_ms.append(answer.first_ms)
            figures.own_ms.append(1e3 * own.generate(answer.prompt, 1).times_s[0])
        try:
            body = workload.send(answer)
        except StopIteration:
            return


def measure(model: Path, rounds: int, pause_s: float) -> dict[str, dict[str, Any]]:
    """Measure every round on a new mesh, since it matters which memory its processes get."""
    figures = {name: Figures() for name in WORKLOADS}
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    for number in range(rounds):
        with tempfile.TemporaryDirectory(dir=base) as name:
            (Path(name) / "mesh").mkdir()
            play_round(model, Path(name), number, figures, pause_s)
    return {name: found.report() for name, found in figures.items()}


def play_round(
    model: Path, folder: Path, number: int, figures: dict[str, Figures], pause_s: float
) -> None:
    import ops.bench.as_workers  # noqa: F401  (before torch, which the next one loads)
    from ops.bench.in_process import InProcess

    with (
        Mesh(folder / "mesh", model=model, pool_bytes=256 << 20, env=NO_DRAFTS) as mesh,
        InProcess(model, folder) as own,
        ExitStack() as stack,
    ):
        connection = stack.enter_context(closing(Connection(mesh.url)))
        warm = random.Random(0)
        for _ in range(4):  # warm up: the first requests run cold code
            prompt = _ids(warm, 600)
            ask(connection, {"prompt": prompt, "max_tokens": 8})
            own.generate(prompt, 8)
        for name, workload in WORKLOADS.items():
            asked = workload(random.Random(f"{name} {number}"))
            play(asked, connection, own, figures[name], pause_s)


def table(figures: dict[str, dict[str, Any]]) -> str:
    lines = [
        f"{'':10} {'requests':>8} {'possible':>9} {'cached of it':>12} {'first token, ms':>16}"
    ]
    for name, found in figures.items():
        first = found["first_token_ms"]
        lines.append(
            f"{name:10} {found['requests']:8} {found['possible_tokens']:9,} "
            f"{found['cached_share_of_possible']:12.2%} {first['mesh']:7.1f} "
            f"(in process {first['in_process']:.1f}, {first['over']:+.1f})   "
            f"{of_aim(found['cached_share_of_possible'], AIM_SHARE, at_least=True)}, "
            f"{_of_aim(first)}"
        )
    return "\n".join(lines)


def _of_aim(first: dict[str, float]) -> str:
    """The aim is a ratio for slow models, and milliseconds for others."""
    if is_slow(first["in_process"], AIM_MS):
        return of_aim(first["mesh"] / first["in_process"], OVER_IN_PROCESS)
    return of_aim(first["over"], AIM_MS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="default: the demo model")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="default: 0")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.pause_ms < 0:
        parser.error("--pause-ms: give 0 or more")
    pause_s = options.pause_ms / 1e3
    figures = measure(find_model(options.model).path, options.rounds, pause_s)
    print(table(figures))
    print(
        f"aims: {AIM_SHARE:.0%} of what is possible, at most {AIM_MS:g} ms over in process, "
        f"or {OVER_IN_PROCESS:g} times as late where that is more"
    )
    if options.out is not None:
        aims = {"cached_share_of_possible": AIM_SHARE, "over_in_process_ms": AIM_MS}
        on = describe() | {"pause_ms": options.pause_ms}
        report = {"on": on, "aims": aims, "workloads": figures}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
