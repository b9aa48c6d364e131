"""A process that dies within a publication, wherever that is: what it leaves is never believed.

The header of a page lies across two pages of memory, one of which a child process may not write
to: it dies at its first store there, after those before it in the order of the program. (Which of
these others see, and in which order, is enumerated in ``test_headers``.)
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import resource
import signal
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.kernels.pools import PAGE_SIZE, write_headers

from pagemesh.kernels.native.header_writer import HeaderWriter
from pagemesh.kernels.native.headers import HeaderTable, address_of
from pagemesh.wire.pool_format import SEQUENCE_BITS, HeaderState, PoolFormat
from pagemesh.wire.tokens import pack_extents

OLD, NEW = 10, 20
WORDS, UNTIL_WORD, CHECK_WORD, PAGE = 16, 6, 7, mmap.PAGESIZE
FORM = PoolFormat(1, PAGE_SIZE, 64)
Words = NDArray[np.uint64]


class Split:
    """A table in memory that processes share, whose only header has its first ``before`` words in
    one page of memory and the others in the next."""

    def __init__(self, before: int) -> None:
        self.before = before
        border = -(-(FORM.headers_offset + 8 * before) // mmap.PAGESIZE) * mmap.PAGESIZE
        size = border + -(-FORM.file_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        start = border - 8 * before - FORM.headers_offset
        self.table = HeaderTable(whole[start : start + FORM.file_bytes], FORM)
        self.border = address_of(whole) + border
        section = self.table.mapped[FORM.headers_offset :][: 8 * WORDS]
        self.words: Words = section.view(np.uint64)

    def publish(self, mark: int, sequence: int) -> Words:
        """The words of the header once it is published."""
        write_headers(self.table, [0], sequence=sequence, mark=mark, state=HeaderState.COMMITTED)
        return self.words.copy()

    def keep(self, until_ms: int) -> None:
        HeaderWriter(self.table).keep(pack_extents([0]), until_ms)

    def die_in_publication(self, first: int) -> None:
        """A child publishes, and may not write into the page of memory that starts at ``first``."""
        self._die(first, lambda: self.publish(2, NEW))

    def _die(self, first: int, writing: Callable[[], object]) -> None:
        child = os.fork()
        if not child:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            address = ctypes.c_void_p(first)
            ctypes.CDLL(None).mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ)
            writing()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV

    def die_in_keeping(self, first: int) -> None:
        self._die(first, lambda: self.keep(9_000))


@pytest.fixture(params=range(1, WORDS))
def split(request: pytest.FixtureRequest) -> Split:
    before: int = request.param
    return Split(before)


def test_the_first_store_says_that_nothing_is_to_be_believed(split: Split) -> None:
    """So who dies at it leaves everything as it was."""
    old = split.publish(1, OLD)
    split.die_in_publication(split.border - mmap.PAGESIZE)
    assert split.words.tolist() == old.tolist()
    assert not split.table.scan().torn.any()


def test_the_state_comes_after_the_check_word_and_that_after_the_body(split: Split) -> None:
    old = split.publish(1, OLD)
    new = Split(1).publish(2, NEW)
    split.die_in_publication(split.border)
    words = split.words.tolist()
    assert words[0] == (HeaderState.INVALID << SEQUENCE_BITS) | NEW
    for at in range(1, WORDS):
        is_written = at < split.before and at != CHECK_WORD
        assert words[at] == (new if is_written else old)[at], f"word {at}"
    assert split.table.scan().torn.all()


def test_who_dies_while_it_keeps_a_page_longer_leaves_it_as_it_was(split: Split) -> None:
    old = split.publish(1, OLD)
    split.die_in_keeping(split.border if split.before <= UNTIL_WORD else split.border - PAGE)
    assert split.words.tolist() == old.tolist()
    split.keep(9_000)
    found = split.table.scan()
    assert not found.torn.any() and found.batch.until_ms.tolist() == [9_000]
