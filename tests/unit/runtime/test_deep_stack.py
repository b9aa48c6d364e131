"""Work that recurses deeply, on a stack of its own."""

from __future__ import annotations

import sys
import threading

import pytest
from llguidance import LLMatcher

from pagemesh.runtime.deep_stack import on_deep_stack

DEPTH = 25_000
CHAIN = "\n".join(f"r{index}: r{index + 1}" for index in range(DEPTH))
"""Rules that an ordinary stack of 8 MiB has no room for: the process would end."""


def test_what_recurses_as_deep_as_its_input_is_long_has_room() -> None:
    grammar = f'start: r0\n{CHAIN}\nr{DEPTH}: "a"'
    assert on_deep_stack(lambda: LLMatcher.validate_grammar(grammar)) == ""


def test_what_the_work_raises_its_caller_gets_and_later_threads_have_ordinary_stacks() -> None:
    before = threading.stack_size()
    with pytest.raises(SystemExit, match="3"):
        on_deep_stack(lambda: sys.exit(3))
    assert threading.stack_size() == before
    assert on_deep_stack(threading.current_thread) not in threading.enumerate()
