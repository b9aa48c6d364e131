"""What share of the slots in pages that sequences use is empty, over time, on real traffic?

    python -m ops.bench.bench_waste TRACE... [--seconds 120] [--out ops/bench/results/waste.json]

Replays the traces together, each from its start, against the production pager core in virtual
time. Every sequence is processed as by a worker: it is admitted with its prompt and pages for the
first chunks (``--prompt-chunks``; 0: for all of it), computed chunk by chunk, extended ahead of
need, then decoded with a commit now and then, and released. The speeds are assumed, the same for
all: prompt tokens a second and milliseconds a token. Traces are the CSV files of the
Azure LLM inference dataset (``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``) and the JSON
lines of Mooncake (``timestamp``, ``input_length``, ``output_length``, ``hash_ids``). Shares are of
the slots in held and pinned pages, weighted by time:

    tail      after the last token, in its page
    growth    in pages ahead of need
    prompt    granted for a prompt and not computed yet, including the current chunk
    gauges    the pager's own gauge (``pagemesh_pager_wasted_slots``), which is a little higher, as
              the pager hears of tokens only when they are committed

``contiguous`` is the share that contiguous allocation would waste if it reserved the maximum length
of each request: its prompt and 2,048 tokens.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from heapq import heappop, heappush
from pathlib import Path

import numpy as np
from ops.bench.aims import of_aim
from ops.bench.hardware import describe
from ops.bench.pager_adapter import EPOCH, INCARNATION, ROOT, WORKER, PagerAdapter

from pagemesh.engine.worker.ahead import first_part, next_part
from pagemesh.engine.worker.settings import WorkerLimits
from pagemesh.wire.messages import Order, SequenceKey
from pagemesh.wire.pager_messages import (
    Admit,
    Commit,
    Extend,
    Extended,
    Fill,
    Granted,
    Queued,
    Release,
)
from pagemesh.wire.tokens import unpack_extents

PAGE_SIZE, POOL_PAGES = 16, 1 << 19
CHUNK_TOKENS, BLOCK_TOKENS, DRAWN_TOKENS = 512, 512, 4
ANSWER_TOKENS_MAX = 2_048
WAIT_MS = 20.0
AIM = 0.04


@dataclass(frozen=True, slots=True)
class Speed:
    """Prompt tokens a second and milliseconds per token of an answer, for each sequence."""

    name: str
    prompt_tokens_s: float
    token_ms: float


SPEEDS = (Speed("slow", 2_000, 40.0), Speed("middle", 5_000, 30.0), Speed("fast", 20_000, 25.0))


@dataclass(frozen=True, slots=True)
class Line:
    """A request: its arrival, its prompt's blocks (none: shared with no other), and its lengths."""

    at_ms: float
    blocks: tuple[int, ...]
    prompt_tokens: int
    answer_tokens: int


def read(path: Path, seconds: float) -> list[Line]:
    """The requests of the first ``seconds`` of a trace."""
    lines = list(_azure(path) if path.suffix == ".csv" else _mooncake(path))
    start = lines[0].at_ms
    return [
        Line(line.at_ms - start, line.blocks, line.prompt_tokens, line.answer_tokens)
        for line in lines
        if line.at_ms - start < 1_000 * seconds and line.prompt_tokens and line.answer_tokens
    ]


def _azure(path: Path) -> Iterator[Line]:
    with path.open() as file:
        for row in csv.DictReader(file):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            yield Line(1_000 * at, (), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake(path: Path) -> Iterator[Line]:
    with path.open() as file:
        for text in file:
            row = json.loads(text)
            blocks = tuple(row["hash_ids"])
            yield Line(row["timestamp"], blocks, row["input_length"], row["output_length"])


class Sequence:
    """A request in progress. ``filled`` counts the slots written so far."""

    def __init__(self, number: int, line: Line) -> None:
        name = f"{number:032x}"
        self.key = SequenceKey(request=name, attempt=1, choice=0)
        self.order = Order(priority=0, arrival_us=number, request=name, choice=0)
        self.line = line
        self.tokens = _tokens(number, line)
        self.tokens_max = line.prompt_tokens + line.answer_tokens - 1
        self.lease = self.page_count = self.filled = self.committed = 0

    @property
    def is_prompt(self) -> bool:
        return self.filled < self.line.prompt_tokens

    def wasted(self) -> tuple[int, int, int]:
        """Wasted slots: tail, growth and prompt."""
        prompt_slots = -(-self.line.prompt_tokens // PAGE_SIZE) * PAGE_SIZE
        slots = self.page_count * PAGE_SIZE
        if self.is_prompt and slots:
            growth = max(slots - prompt_slots, 0)
            return 0, growth, slots - growth - self.filled
        tail = -self.filled % PAGE_SIZE
        return tail, slots - self.filled - tail, 0


def _tokens(number: int, line: Line) -> bytes:
    count = line.prompt_tokens + line.answer_tokens
    own = np.random.default_rng(number).integers(0, 1 << 30, count, np.uint32)
    for at, block in enumerate(line.blocks):
        first = at * BLOCK_TOKENS
        size = min(BLOCK_TOKENS, line.prompt_tokens - first)
        if size > 0:
            shared = np.random.default_rng(1 << 40 | block)
            own[first : first + size] = shared.integers(0, 1 << 30, BLOCK_TOKENS, np.uint32)[:size]
    return own.tobytes()


class Replay:
    """All sequences of ``lines`` at one speed."""

    def __init__(self, lines: list[Line], speed: Speed, limits: WorkerLimits) -> None:
        self._pager = PagerAdapter(POOL_PAGES, PAGE_SIZE)
        self._speed = speed
        self._limits = limits
        self._queue: list[tuple[float, int, Sequence]] = []
        for number, line in enumerate(lines, 1):
            heappush(self._queue, (line.at_ms, number, Sequence(number, line)))
        self._live: dict[int, tuple[int, int, int]] = {}
        self._sums = np.zeros(3)
        """Wasted slots of all sequences now: tail, growth and prompt."""
        self._areas = np.zeros(6)
        """Integrals over time: these, used slots, the pager's gauge, waste if contiguous."""
        self._contiguous_area = 0.0
        self.extend_count = 0
        """Number of requests for more pages."""

    def run(self) -> dict[str, float]:
        """Run to the end; returns shares of the used slots, over time."""
        now_ms = 0.0
        while self._queue:
            at_ms, number, sequence = heappop(self._queue)
            self._pass(at_ms - now_ms)
            now_ms = at_ms
            wait_ms = self._step(sequence)
            self._count_waste(number, sequence)
            if wait_ms is not None:
                heappush(self._queue, (now_ms + wait_ms, number, sequence))
        tail, growth, prompt, used, gauges, contiguous = self._areas
        return {
            "tail": tail / used, "growth": growth / used, "prompt": prompt / used,
            "total": (tail + growth + prompt) / used, "gauges": gauges / used,
            "contiguous": contiguous / self._contiguous_area,
        }  # fmt: skip

    def _pass(self, span_ms: float) -> None:
        pool, waste = self._pager.core.books.pool, self._pager.core.books.waste
        used = (pool.held + pool.pinned) * PAGE_SIZE
        filled = sum(lease.filled_tokens for lease in self._pager.core.books.leases.values())
        now = [*self._sums, used, waste.unfilled_slots, waste.contiguous_slots]
        self._areas += span_ms * np.array(now)
        self._contiguous_area += span_ms * (waste.contiguous_slots + filled)

    def _count_waste(self, number: int, sequence: Sequence) -> None:
        before, now = self._live.get(number, (0, 0, 0)), sequence.wasted()
        self._sums += np.subtract(now, before)
        self._live[number] = now

    def _step(self, sequence: Sequence) -> float | None:
        """Do the sequence's next step; returns the milliseconds until the one after it."""
        if not sequence.lease:
            if not self._is_admitted(sequence):
                return WAIT_MS
        elif sequence.is_prompt:
            size = min(CHUNK_TOKENS, sequence.line.prompt_tokens - sequence.filled)
            sequence.filled += size
            self._commit(sequence, 1)
        elif sequence.filled >= sequence.tokens_max:
            self._release(sequence)
            return None
        else:
            sequence.filled = min(sequence.filled + DRAWN_TOKENS, sequence.tokens_max)
            self._commit(sequence, self._limits.commit_pages)
        if sequence.is_prompt:
            size = min(CHUNK_TOKENS, sequence.line.prompt_tokens - sequence.filled)
            self._extend_prompt(sequence, sequence.filled + size)
            return 1_000 * size / self._speed.prompt_tokens_s
        self._extend(sequence)
        return DRAWN_TOKENS * self._speed.token_ms

    def _reserve(self, sequence: Sequence) -> int:
        length = max(sequence.filled + 1, sequence.line.prompt_tokens)
        ahead = length + self._limits.growth_pages * PAGE_SIZE
        return max(length, min(ahead, sequence.tokens_max))

    def _is_admitted(self, sequence: Sequence) -> bool:
        """Ask for admission. False: the sequence has to wait for pages that another one computes,
        and asks again."""
        prompt_tokens = sequence.line.prompt_tokens
        granted = self._pager.ask(
            Admit(
                key=sequence.key, order=sequence.order, worker=WORKER, incarnation=INCARNATION,
                epoch=EPOCH, root=ROOT, tokens=sequence.tokens[: 4 * prompt_tokens],
                reserve_tokens=self._reserve(sequence),
                tokens_max=prompt_tokens + ANSWER_TOKENS_MAX, deadline_ms=60_000,
                first_tokens=first_part(CHUNK_TOKENS, self._limits.prompt_chunks),
            )
        )  # fmt: skip
        if isinstance(granted, Queued):
            assert not granted.ahead_count, "the pool is too small"
            return False
        assert isinstance(granted, Granted), granted
        sequence.lease, sequence.filled = granted.lease, granted.cached_tokens
        sequence.committed = granted.cached_tokens
        table = unpack_extents(granted.extents, page_count_max=POOL_PAGES)
        sequence.page_count = len(table)
        return True

    def _extend_prompt(self, sequence: Sequence, end: int) -> None:
        low, wanted = next_part(
            end, sequence.line.prompt_tokens, self._reserve(sequence),
            chunk_tokens=CHUNK_TOKENS, chunks=self._limits.prompt_chunks,
        )  # fmt: skip
        self._lengthen(sequence, low, wanted)

    def _extend(self, sequence: Sequence) -> None:
        low = min(sequence.filled + 1 + PAGE_SIZE, sequence.tokens_max)
        self._lengthen(sequence, low, self._reserve(sequence))

    def _lengthen(self, sequence: Sequence, low: int, wanted: int) -> None:
        """Ask for ``wanted`` slots if it has fewer than ``low``."""
        if sequence.page_count * PAGE_SIZE >= low:
            return
        page_count = -(-wanted // PAGE_SIZE)
        self.extend_count += 1
        extended = self._pager.ask(
            Extend(
                key=sequence.key, worker=WORKER, incarnation=INCARNATION, lease=sequence.lease,
                have_pages=sequence.page_count, page_count=page_count,
            )
        )  # fmt: skip
        assert isinstance(extended, Extended), extended
        sequence.page_count = page_count

    def _fill(self, sequence: Sequence) -> Fill:
        known = min(sequence.committed, sequence.line.prompt_tokens)
        return Fill(
            filled_tokens=sequence.filled, first_token=known,
            tokens=sequence.tokens[4 * known : 4 * sequence.filled],
        )  # fmt: skip

    def _commit(self, sequence: Sequence, pages_min: int) -> None:
        full = sequence.filled - sequence.filled % PAGE_SIZE
        if full - sequence.committed >= pages_min * PAGE_SIZE:
            self._pager.ask(
                Commit(
                    key=sequence.key, worker=WORKER, incarnation=INCARNATION,
                    lease=sequence.lease, fill=self._fill(sequence),
                )
            )  # fmt: skip
            sequence.committed = full

    def _release(self, sequence: Sequence) -> None:
        self._pager.ask(
            Release(
                key=sequence.key, worker=WORKER, incarnation=INCARNATION, lease=sequence.lease,
                fill=self._fill(sequence),
            )
        )  # fmt: skip
        sequence.filled = sequence.page_count = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path, nargs="*")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--prompt-chunks", type=int, default=WorkerLimits().prompt_chunks)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.traces:
        print("no trace is named: nothing is replayed")
        return
    lines = [line for path in options.traces for line in read(path, options.seconds)]
    print(f"{len(lines)} requests of the first {options.seconds:.0f} seconds")
    limits = WorkerLimits(prompt_chunks=options.prompt_chunks)
    results: dict[str, dict[str, float]] = {}
    calls: dict[str, int] = {}
    for speed in SPEEDS:
        replay = Replay(lines, speed, limits)
        found = results[speed.name] = replay.run()
        calls[speed.name] = replay.extend_count
        shares = ", ".join(f"{name} {value:.2%}" for name, value in found.items())
        print(
            f"{speed.name:7} {speed.prompt_tokens_s:.0f} tokens/s, {speed.token_ms:.0f} ms: "
            f"{shares}; {calls[speed.name]} calls for more pages; {of_aim(found['total'], AIM)}"
        )
    if options.out is not None:
        report = {
            "machine": describe(),
            "traces": [path.name for path in options.traces],
            "seconds": options.seconds,
            "requests": len(lines),
            "page_size": PAGE_SIZE,
            "growth_pages": limits.growth_pages,
            "prompt_chunks": limits.prompt_chunks,
            "chunk_tokens": CHUNK_TOKENS,
            "aim": AIM,
            "speeds": {s.name: [s.prompt_tokens_s, s.token_ms] for s in SPEEDS},
            "shares": results,
            "extend_calls": calls,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
