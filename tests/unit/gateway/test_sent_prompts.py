"""What is on its way to a host, and how much of it is remembered."""

from __future__ import annotations

import numpy as np

from pagemesh.gateway.sent_prompts import ALIKE_COUNT_MAX, LIFE_MS, SentPrompts
from pagemesh.wire.tokens import U32

PAGE = 4
ROOT = b"r" * 32


def prompt(*parts: int) -> U32:
    """A page for each of ``parts``."""
    return np.repeat(np.array(parts, "<u4"), PAGE)


def coming(
    sent: SentPrompts, tokens: U32, *, host: str = "a", root: bytes = ROOT, now_ms: int = 0
) -> int:
    sent.check()
    return sent.coming_pages(host, root, tokens, PAGE, now_ms)


def test_whole_pages_in_common_count_on_that_host_under_that_root() -> None:
    sent = SentPrompts()
    sent.note("a", ROOT, prompt(1, 2, 3), PAGE, 0)
    assert coming(sent, prompt(1, 2, 3)) == 3
    assert coming(sent, prompt(1, 2, 3, 4)) == 3
    assert coming(sent, prompt(1, 2)) == 2
    assert coming(sent, prompt(1, 2, 9)) == 2
    assert coming(sent, prompt(1, 2, 3)[:-1]) == 2
    assert coming(sent, prompt(2, 3)) == 0
    assert coming(sent, prompt(1)[:2]) == 0
    assert coming(sent, prompt(1, 2, 3), host="b") == 0
    assert coming(sent, prompt(1, 2, 3), root=b"o" * 32) == 0


def test_the_longest_of_those_that_begin_alike_counts() -> None:
    sent = SentPrompts()
    for tokens in (prompt(1, 2, 3), prompt(1, 5), prompt(1, 2, 3, 4)):
        sent.note("a", ROOT, tokens, PAGE, 0)
    assert coming(sent, prompt(1, 2, 3, 4, 5)) == 4
    assert coming(sent, prompt(1, 5, 6)) == 2


def test_what_was_sent_is_forgotten_after_a_while() -> None:
    sent = SentPrompts()
    sent.note("a", ROOT, prompt(1, 2, 3), PAGE, 0)
    sent.note("a", ROOT, prompt(1, 2), PAGE, 10)
    assert coming(sent, prompt(1, 2, 3), now_ms=LIFE_MS - 1) == 3
    assert coming(sent, prompt(1, 2, 3), now_ms=LIFE_MS) == 2
    assert coming(sent, prompt(1, 2, 3), now_ms=LIFE_MS + 10) == 0


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    sent = SentPrompts(token_count_max=10 * PAGE)
    for part in range(11):
        sent.note("a", ROOT, prompt(part), PAGE, 0)
    assert coming(sent, prompt(0)) == 0
    assert coming(sent, prompt(10)) == 1
    sent.note("a", ROOT, prompt(*range(11)), PAGE, 0)
    assert coming(sent, prompt(10)) == 1
    for part in range(ALIKE_COUNT_MAX + 1):
        sent.note("a", ROOT, prompt(1, part), PAGE, 0)
        sent.check()
    assert coming(sent, prompt(1, 0)) == 1
