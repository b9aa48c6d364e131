"""Prompts that were answered lately, by host. What they begin with is cached there, even if the
pager, which reports several times a second, has not said so yet. A prompt that follows at once and
begins alike, such as the next turn of a conversation, should go there too.

A hint, like the page index: a wrong one costs time. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from pagemesh.gateway.calls.events import Worker
from pagemesh.wire.tokens import U32

PROMPTS_MAX = 256
TOKEN_COUNT_MAX = 1 << 20
COMPARED_MAX = 8
"""Of the prompts that begin alike, how many are compared, the latest first."""
_EVENTS = 2
"""After so many events of the pager a prompt is forgotten. The first event may have been on its way
before the prompt's pages were cached."""
_HEAD_TOKENS = 16


@dataclass(slots=True, eq=False)
class _Prompt:
    root: bytes
    tokens: U32
    host: str
    worker: Worker
    event_count: int = 0


class RecentPrompts:
    """At most ``PROMPTS_MAX`` prompts, of ``TOKEN_COUNT_MAX`` tokens together. A prompt is
    forgotten after the second event of its host's pager: by then the page index knows what of it is
    cached."""

    def __init__(self) -> None:
        self._prompts: list[_Prompt] = []
        """The latest last."""
        self._alike: defaultdict[tuple[bytes, bytes], list[_Prompt]] = defaultdict(list)
        """By root and first tokens."""
        self._token_count = 0

    def answered(self, root: bytes, tokens: U32, host: str, worker: Worker) -> None:
        """``worker`` of ``host`` has computed ``tokens``."""
        if not _HEAD_TOKENS <= len(tokens) <= TOKEN_COUNT_MAX:
            return
        prompt = _Prompt(root, tokens, host, worker)
        self._prompts.append(prompt)
        self._alike[_start(root, tokens)].append(prompt)
        self._token_count += len(tokens)
        while len(self._prompts) > PROMPTS_MAX or self._token_count > TOKEN_COUNT_MAX:
            self._forget(self._prompts[0])

    def told(self, host: str) -> None:
        """The pager of ``host`` sent an event."""
        for prompt in [prompt for prompt in self._prompts if prompt.host == host]:
            prompt.event_count += 1
            if prompt.event_count == _EVENTS:
                self._forget(prompt)

    def shared_tokens(self, root: bytes, tokens: U32, avoid: Collection[Worker]) -> dict[str, int]:
        """By host: how many leading ``tokens`` are those of a prompt that was answered there,
        unless by a worker in ``avoid``."""
        found: dict[str, int] = {}
        for prompt in self._alike.get(_start(root, tokens), ())[: -COMPARED_MAX - 1 : -1]:
            if prompt.worker not in avoid:
                count = _shared(prompt.tokens, tokens)
                found[prompt.host] = max(count, found.get(prompt.host, 0))
        return found

    def _forget(self, prompt: _Prompt) -> None:
        self._prompts.remove(prompt)
        self._token_count -= len(prompt.tokens)
        start = _start(prompt.root, prompt.tokens)
        self._alike[start].remove(prompt)
        if not self._alike[start]:
            del self._alike[start]

    def check(self) -> None:
        """Raises ``AssertionError`` when an invariant is broken."""
        assert self._token_count == sum(len(prompt.tokens) for prompt in self._prompts)
        assert len(self._prompts) <= PROMPTS_MAX and self._token_count <= TOKEN_COUNT_MAX
        assert sum(map(len, self._alike.values())) == len(self._prompts)
        assert all(self._alike.values())


def _start(root: bytes, tokens: U32) -> tuple[bytes, bytes]:
    return root, tokens[:_HEAD_TOKENS].tobytes()


def _shared(one: U32, other: U32) -> int:
    count = min(len(one), len(other))
    differs = one[:count] != other[:count]
    return int(np.argmax(differs)) if differs.any() else count
