"""Virtual time, one source of randomness, processes that crash and freeze, and a network that
delays, loses, repeats and reorders messages and has partitions.

Everything that happens is a scheduled callback. Callbacks at the same time run in the order in
which they were scheduled, so a seed always gives the same run.
"""

from __future__ import annotations

import heapq
import random
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pagemesh.wire.codec import decode, encode
from pagemesh.wire.messages import Message, Refused

TRACE_LINES_MAX = 4_000


_SHORTER = [
    (re.compile(r"SequenceKey\(request='0*([0-9a-f]+)', attempt=(\d+), choice=(\d+)\)"),
     r"#\1.\2.\3"),
    (re.compile(r"Order\([^)]*\)(, )?|(root|waterfall|model_root)=[^,)]*\)?(, )?"), ""),
    (re.compile(r", (worker|incarnation|dtype|group|pool|layout_digest|host)=[^,)]*"), ""),
    (re.compile(r"(\w+)=(None|b''|\[\]|\(\)|0|False)(, )?"), ""),
    (re.compile(r"Sampling\([^)]*\)(, )?|logit_bias=\{\}, "), ""),
    (re.compile(r"<function .*? at 0x\w+>"), "call"),
    (re.compile(r"b'[^']{24,}'|b\"[^\"]{24,}\""), "b'..'"),
]  # fmt: skip


def brief(text: str) -> str:
    """``text`` of an event or command without details that a reader of a trace would skip."""
    for pattern, shorter in _SHORTER:
        text = pattern.sub(shorter, text)
    return text


class Broken(AssertionError):
    """An invariant does not hold; the message says which."""


@dataclass(slots=True)
class Weather:
    """The current condition of the network."""

    loss: float = 0.0
    repeat: float = 0.0
    late: float = 0.0
    """Share of messages that take up to ``late_ms_max`` instead of a millisecond or two."""
    late_ms_max: float = 200.0


class World:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.events_count = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._trace: deque[tuple[float, str, str, object]] = deque(maxlen=TRACE_LINES_MAX)

    def at(self, delay_ms: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now + delay_ms, self._order, act))

    def run(self, until_ms: float, *, stop: Callable[[], bool] | None = None) -> None:
        """Let time pass until ``until_ms``, or until ``stop`` returns True."""
        while self._queue and self._queue[0][0] <= until_ms:
            self.now, _, act = heapq.heappop(self._queue)
            self.events_count += 1
            act()
            if stop is not None and stop():
                return
        self.now = max(self.now, until_ms)

    def note(self, who: str, what: str, detail: object = "") -> None:
        """Add a line to the trace; ``detail`` is formatted only when the trace is printed."""
        self._trace.append((self.now, who, what, detail))

    def trace(self, lines: int) -> list[str]:
        return [
            f"{at:10.3f} {who:<13} {what:<8} {brief(str(detail))[:360]}"
            for at, who, what, detail in list(self._trace)[-lines:]
        ]

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            raise Broken(what)


class Process:
    """Something with a name that can be killed, started again, frozen and thawed.

    A callback scheduled in one life never runs in another; one that comes due while the process is
    frozen runs when it thaws.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.life = 0
        self.alive = False
        self.frozen = False
        self.slowness = 1.0
        self.thawed_ms = 0.0
        self._backlog: list[Callable[[], None]] = []

    def at(self, delay_ms: float, act: Callable[[], None]) -> None:
        """Schedule ``act`` for this life of the process."""
        life = self.life

        def due() -> None:
            if not self.alive or self.life != life:
                return
            if self.frozen:
                self._backlog.append(act)
            else:
                act()

        self.world.at(delay_ms, due)

    def begin(self) -> None:
        self.life += 1
        self.alive = True
        self.frozen = False
        self.world.note(self.name, "start", self.life)

    def kill(self) -> None:
        self.alive = False
        self.frozen = False
        self._backlog.clear()
        self.world.note(self.name, "killed", self.life)

    def freeze(self) -> None:
        if self.alive:
            self.frozen = True
            self.world.note(self.name, "frozen")

    def thaw(self) -> None:
        """Continue. Everything that came due meanwhile happens at once, in any order."""
        if not self.frozen:
            return
        self.frozen, self.thawed_ms = False, self.world.now
        self.world.note(self.name, "thawed")
        backlog, self._backlog = self._backlog, []
        if self.world.random.random() < 0.5:
            self.world.random.shuffle(backlog)
        for act in backlog:
            self.at(0.0, act)


Act = Callable[[], None]
Witness = Callable[[Process, Message, Act], None]
"""Called with each message before a process handles it; decides whether and when it does."""
Reply = Callable[[Message], None]
Handler = Callable[[Reply | None, Message], None]


class Network:
    def __init__(self, world: World) -> None:
        self.world = world
        self.weather = Weather()
        self.witness: Witness | None = None
        self._parted: set[frozenset[str]] = set()
        self._held: dict[str, list[Callable[[], None]]] = {}
        self._doors: dict[str, tuple[Process, Handler]] = {}
        self.sent_count = 0
        self.lost_count = 0

    def serve(self, process: Process, handler: Handler) -> None:
        """``handler`` gets the messages sent to ``process`` by name."""
        self._doors[process.name] = (process, handler)

    def part(self, one: str, other: str) -> None:
        self._parted.add(frozenset((one, other)))

    def join(self, one: str, other: str) -> None:
        self._parted.discard(frozenset((one, other)))

    def reaches(self, one: str, other: str) -> bool:
        return frozenset((one, other)) not in self._parted

    def hold(self, target: str) -> None:
        """Hold back all messages to ``target`` until ``let_go``, except answers to its own
        calls."""
        self._held.setdefault(target, [])

    def let_go(self, target: str) -> None:
        """Deliver the messages held back, mostly in the order in which they arrived."""
        held, dice = self._held.pop(target, []), self.world.random
        if dice.random() < 0.3:
            dice.shuffle(held)
        for index, arrive in enumerate(held):
            self.world.at(0.5 * index, arrive)

    def calm(self) -> None:
        """End all network faults for good."""
        for target in list(self._held):
            self.let_go(target)
        self.weather = Weather()
        self._parted.clear()

    def send(self, source: Process, target: str, message: Message) -> None:
        """Send a message that has no answer: it may arrive late, twice, or not at all."""
        self._deliver(source, target, message, None)

    def ask_for(self, source: Process, whom: str, target: str, message: Message) -> None:
        """Ask ``target``; it sends its answer to ``whom``."""
        asked, _ = self._doors[target]
        self._deliver(source, target, message, lambda answer: self.send(asked, whom, answer))

    def call(
        self,
        source: Process,
        target: str,
        message: Message,
        timeout_ms: float,
        answered: Callable[[Message], None],
    ) -> None:
        """Ask ``target``. ``answered`` gets exactly one message in this life of ``source``, and
        none in the next, which must not hear answers to an earlier life's calls."""
        is_open, life = True, source.life

        def close(reply: Message) -> None:
            nonlocal is_open
            if is_open and source.life == life:
                is_open = False
                answered(reply)

        def reply(answer: Message) -> None:
            take = partial(self._take_up, source, answer, lambda: close(answer))
            self._pass(target, source.name, lambda: source.at(0.0, take))

        process, _ = self._doors[target]
        if not process.alive and self.world.random.random() < 0.8:
            absent = Refused(code="Absent", message=f"no responders: {target}")
            source.at(1.0, lambda: close(absent))
            return
        late = Refused(code="DeadlineExceeded", message=f"{target} did not answer")
        source.at(timeout_ms, lambda: close(late))
        self._deliver(source, target, message, reply)

    def _deliver(self, source: Process, target: str, message: Message, reply: Reply | None) -> None:
        process, handler = self._doors[target]
        if self.world.random.random() < 0.02:  # messages must survive the codec
            self.world.expect(decode(encode(message)) == message, f"codec changes {message}")

        take = partial(self._take_up, process, message, lambda: handler(reply, message))

        def arrive() -> None:
            if target in self._held:
                self._held[target].append(arrive)
            else:
                process.at(0.0, take)

        self._pass(source.name, target, arrive)

    def _take_up(self, process: Process, message: Message, act: Act) -> None:
        if self.witness is None:
            act()
        else:
            self.witness(process, message, act)

    def _pass(self, source: str, target: str, arrive: Callable[[], Any]) -> None:
        weather, dice = self.weather, self.world.random
        copies = 1 + (dice.random() < weather.repeat)
        process, _ = self._doors[target]
        life = process.life

        def again() -> None:
            if target in self._held:
                self._held[target].append(again)
            elif process.life == life:  # no bus delivers a message to two lives of a subscriber
                arrive()

        for number in range(copies):
            self.sent_count += 1
            if not self.reaches(source, target) or dice.random() < weather.loss:
                self.lost_count += 1
                continue
            delay = 0.2 + dice.random()
            if dice.random() < weather.late:
                delay += dice.random() * weather.late_ms_max
            self.world.at(delay, again if number else arrive)
