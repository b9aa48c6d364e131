"""Prompts that went somewhere lately, by where: their pages are being computed there, or are cached
and the pager has not told so yet, which it does some times a second. What comes next and begins
alike, the next turn of a talk above all, had better go there too.

    sent --ended--> over --two events of the pager--> forgotten: what is cached is known by now
      |                                                  ^
      +--its worker is lost ----------------------------+

A hint, as the index of pages is: a wrong one costs time. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from pagemesh.gateway.calls.events import Route, Worker
from pagemesh.wire.tokens import U32

PROMPTS_MAX = 256
TOKEN_COUNT_MAX = 1 << 20
COMPARED_MAX = 8
"""Of those that begin alike so many are looked at, the latest."""
_EVENTS = 2
"""The first may have been on its way before the pages were cached."""
_HEAD_TOKENS = 16


@dataclass(slots=True, eq=False)
class _Prompt:
    route: Route
    host: str
    tokens: U32
    is_over: bool = False
    event_count: int = 0


class RecentPrompts:
    """At most ``PROMPTS_MAX``, of ``TOKEN_COUNT_MAX`` tokens together."""

    def __init__(self) -> None:
        self._prompts: dict[int, _Prompt] = {}
        """By the identity of their routes, the latest last."""
        self._alike: defaultdict[tuple[bytes, bytes], list[_Prompt]] = defaultdict(list)
        """By root and first tokens."""
        self._token_count = 0

    def sent(self, route: Route, host: str, tokens: U32) -> None:
        """``tokens`` went to ``host`` by ``route``."""
        if id(route) in self._prompts or not _HEAD_TOKENS <= len(tokens) <= TOKEN_COUNT_MAX:
            return
        prompt = _Prompt(route, host, tokens)
        self._prompts[id(route)] = prompt
        self._alike[_start(prompt.route.root, tokens)].append(prompt)
        self._token_count += len(tokens)
        while len(self._prompts) > PROMPTS_MAX or self._token_count > TOKEN_COUNT_MAX:
            self._forget(next(iter(self._prompts.values())))

    def ended(self, route: Route) -> None:
        """What went by ``route`` is computed, or given up."""
        prompt = self._prompts.get(id(route))
        if prompt is not None:
            prompt.is_over = True

    def told(self, host: str) -> None:
        """The pager of ``host`` told what is cached."""
        for prompt in self._of_host(host):
            prompt.event_count += prompt.is_over
            if prompt.event_count >= _EVENTS:
                self._forget(prompt)

    def lost(self, who: Worker) -> None:
        """What ``who`` had not computed yet nobody will."""
        for prompt in list(self._prompts.values()):
            if prompt.route.worker == who and not prompt.is_over:
                self._forget(prompt)

    def shared_tokens(self, root: bytes, tokens: U32, avoid: Collection[Worker]) -> dict[str, int]:
        """By host: how many first ones of ``tokens`` some prompt had that went there, but by a
        worker to ``avoid``, who most likely did not compute it."""
        found: dict[str, int] = {}
        for prompt in self._alike.get(_start(root, tokens), ())[: -COMPARED_MAX - 1 : -1]:
            if prompt.route.worker not in avoid:
                count = _shared(prompt.tokens, tokens)
                found[prompt.host] = max(count, found.get(prompt.host, 0))
        return found

    def _of_host(self, host: str) -> Iterator[_Prompt]:
        return (prompt for prompt in list(self._prompts.values()) if prompt.host == host)

    def _forget(self, prompt: _Prompt) -> None:
        del self._prompts[id(prompt.route)]
        self._token_count -= len(prompt.tokens)
        start = _start(prompt.route.root, prompt.tokens)
        self._alike[start].remove(prompt)
        if not self._alike[start]:
            del self._alike[start]

    def check(self) -> None:
        """Raises ``AssertionError`` when an invariant is broken."""
        prompts = self._prompts.values()
        assert self._token_count == sum(len(prompt.tokens) for prompt in prompts)
        assert len(prompts) <= PROMPTS_MAX and self._token_count <= TOKEN_COUNT_MAX
        assert sum(map(len, self._alike.values())) == len(prompts) and all(self._alike.values())


def _start(root: bytes, tokens: U32) -> tuple[bytes, bytes]:
    return root, tokens[:_HEAD_TOKENS].tobytes()


def _shared(one: U32, other: U32) -> int:
    count = min(len(one), len(other))
    differs = one[:count] != other[:count]
    return int(np.argmax(differs)) if differs.any() else count
