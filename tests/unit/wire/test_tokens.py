"""Packed words and extents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemesh.wire.errors import Malformed
from pagemesh.wire.tokens import EMPTY, pack, pack_extents, unpack, unpack_extents

WORDS = st.lists(st.integers(0, 2**32 - 1), max_size=200)
PAGES = st.lists(st.integers(0, 2**31), max_size=200)


@given(WORDS)
def test_words_survive_packing_as_a_list_and_as_an_array(words: list[int]) -> None:
    data = pack(words)
    assert len(data) == 4 * len(words)
    assert unpack(data).tolist() == words
    assert pack(np.array(words, np.uint32)) == data


@given(st.binary(max_size=50))
def test_an_odd_length_is_malformed_and_any_other_is_not(data: bytes) -> None:
    if len(data) % 4:
        with pytest.raises(Malformed, match="multiple of 4"):
            unpack(data)
    else:
        assert pack(unpack(data)) == data


def test_what_is_unpacked_cannot_be_written() -> None:
    for words in (unpack(pack([1, 2])), EMPTY):
        with pytest.raises(ValueError, match="read-only"):
            words[...] = 7


@given(PAGES)
def test_a_page_table_survives_as_extents(pages: list[int]) -> None:
    assert unpack_extents(pack_extents(pages), page_count_max=1_000).tolist() == pages
    assert pack_extents(np.array(pages, np.uint32)) == pack_extents(pages)


@pytest.mark.parametrize(
    ("pages", "runs"),
    [
        ([], []),
        ([7], [7, 1]),
        ([7, 8, 9], [7, 3]),
        ([9, 8, 7], [9, 1, 8, 1, 7, 1]),
        ([0, 1, 5, 6, 7, 2], [0, 2, 5, 3, 2, 1]),
        ([3, 3], [3, 1, 3, 1]),
    ],
)
def test_neighbours_become_one_run(pages: list[int], runs: list[int]) -> None:
    assert unpack(pack_extents(pages)).tolist() == runs


@pytest.mark.parametrize("length", range(25))
def test_few_runs_and_many_are_one_table(length: int) -> None:
    pages = [page for run in range(length) for page in range(100 * run, 100 * run + 1 + run)]
    assert unpack_extents(pack_extents(pages), page_count_max=1_000).tolist() == pages


BEFORE = [[], [3, 1] * 20]
"""Good runs ahead of bad ones: a few and many are unpacked in two ways."""


@pytest.mark.parametrize("before", BEFORE, ids=["few", "many"])
@pytest.mark.parametrize(
    "words",
    [[1], [1, 2, 3], [1, 0], [1, 2, 5, 0], [0, 101], [0, 50, 60, 51], [0, 2**32 - 1]],
)
def test_extents_that_are_broken_or_too_many_are_malformed(
    words: list[int], before: list[int]
) -> None:
    with pytest.raises(Malformed):
        unpack_extents(pack(before + words), page_count_max=100)


@pytest.mark.parametrize("before", BEFORE, ids=["few", "many"])
def test_extents_run_to_the_last_word_and_not_past_it(before: list[int]) -> None:
    table = unpack_extents(pack([*before, 2**32 - 2, 2]), page_count_max=100)
    assert table[-2:].tolist() == [2**32 - 2, 2**32 - 1]
    with pytest.raises(Malformed):
        unpack_extents(pack([*before, 2**32 - 2, 3]), page_count_max=100)


def test_a_huge_claim_is_refused_before_anything_of_its_size_is_made() -> None:
    claim = pack([0, 2**32 - 1] * 1_000)
    with pytest.raises(Malformed, match="at most 100"):
        unpack_extents(claim, page_count_max=100)
