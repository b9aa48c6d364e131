"""Headers written list by list are, word by word, those that the pool's format asks for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.kernels.pools import PAGE_SIZE

from pagemesh.kernels.native.header_writer import HeaderWriter
from pagemesh.kernels.native.headers import HeaderTable, address_of
from pagemesh.kernels.native.library import library
from pagemesh.wire.pool_format import SEQUENCE_BITS, UNTIL_FOREVER_MS, HeaderState, PoolFormat
from pagemesh.wire.tokens import pack_extents

PAGES = 64


SOME = st.integers(0, PAGES - 1)


def table_for(page_size: int = PAGE_SIZE) -> HeaderTable:
    form = PoolFormat(PAGES, page_size, 64)
    return HeaderTable(np.zeros(form.file_bytes, np.uint8), form)


def words_of(table: HeaderTable) -> NDArray[np.uint64]:
    """The header words of every page, to be written to."""
    form = table.form
    section = table.mapped[form.headers_offset : form.headers_offset + PAGES * form.header_bytes]
    words: NDArray[np.uint64] = section.view(np.uint64).reshape(PAGES, form.header_words)
    return words


@settings(deadline=None)
@given(
    st.lists(st.integers(0, PAGES - 1), unique=True, max_size=20)
    | st.builds(lambda first, count: [*range(PAGES)][first:][:count], SOME, SOME),
    st.sampled_from([1, 7, 16, 256]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**40),
    st.sampled_from([0, 1, 2**48 - 2]),
)
def test_a_list_of_headers_is_written_word_by_word_as_the_format_says(
    ids: list[int], page_size: int, counting: bool, filled: bool, first: int, until_ms: int
) -> None:
    pages, count = np.array(ids, np.uint32), len(ids)
    sequences = np.arange(first, first + count, dtype=np.uint64)
    if not counting:
        sequences = sequences[::-1].copy()
    identities = np.arange(first + 100, first + 100 + count, dtype=np.uint64) * np.uint64(filled)
    parents = np.append(np.uint64(7), identities[:-1])[:count] * np.uint64(filled)
    tokens = np.arange(count * page_size, dtype=np.uint32).reshape(count, page_size) + 5
    tokens *= np.uint32(filled)
    table = table_for(page_size)
    is_run = count > 0 and ids == [*range(ids[0], ids[0] + count)]
    HeaderWriter(table).write(
        range(ids[0], ids[0] + count) if is_run else pack_extents(pages), HeaderState.COMMITTED,
        range(first, first + count) if counting else sequences.tobytes(), writer=9, root=3,
        first_identity=first + 100 if filled else 0, parent=7 if filled else 0,
        tokens=tokens.tobytes() if filled else b"",
        until_ms=until_ms,
    )  # fmt: skip
    wanted = table_for(page_size)
    headers = words_of(wanted)
    headers[pages, 0] = (HeaderState.COMMITTED << SEQUENCE_BITS) + sequences
    headers[pages, 1], headers[pages, 2], headers[pages, 3] = identities, parents, 9
    headers[pages, 4] = 3 + (page_size * filled << 32)
    headers[:, 8:].view(np.uint32)[pages, :page_size] = tokens
    headers[pages, 6] = words_of(table)[pages, 6]
    assert (headers[pages, 6] & np.uint64(UNTIL_FOREVER_MS)).tolist() == [until_ms] * count
    for page in ids:
        headers[page, 7] = library().pm_check_word(address_of(headers[page]), headers.shape[1])
    assert np.array_equal(table.mapped, wanted.mapped)
    found = table.scan()
    assert not found.torn[pages].any()
    assert found.batch.sequences[pages].tolist() == sequences.tolist()


def test_a_mark_changes_states_and_sequences_and_leaves_the_rest() -> None:
    table = table_for()
    writer = HeaderWriter(table)
    extents = pack_extents([3, 4, 9])
    writer.write(extents, HeaderState.HELD, range(20, 23), writer=5, root=1)
    writer.mark(extents, HeaderState.DRAINING, np.array([20, 21, 40], np.uint64).tobytes())
    found = table.scan().batch
    assert found.states[[3, 4, 9]].tolist() == [HeaderState.DRAINING] * 3
    assert found.sequences[[3, 4, 9]].tolist() == [20, 21, 40]
    assert found.writers[[3, 4, 9]].tolist() == [5, 5, 5]
    assert not table.scan().torn.any()


def test_numbers_of_any_list_are_those_that_are_written() -> None:
    table = table_for()
    writer = HeaderWriter(table)
    sequences = np.array([9, 7, 8], np.uint64).tobytes()
    writer.write(range(3, 6), HeaderState.HELD, sequences, writer=5, root=1)
    assert table.scan().batch.sequences[3:6].tolist() == [9, 7, 8]
    before = table.mapped.copy()
    writer.write(range(7, 7), HeaderState.HELD, range(1, 1), writer=5, root=1)
    assert np.array_equal(table.mapped, before)


def test_pages_beyond_the_pool_are_refused_before_anything_is_written() -> None:
    table = table_for()
    writer, extents = HeaderWriter(table), pack_extents([0, 1, PAGES - 1, PAGES])
    with pytest.raises(IndexError, match=f"pages {PAGES - 1} to {PAGES + 1} are not all below"):
        writer.write(extents, HeaderState.HELD, range(1, 5), writer=1, root=0)
    with pytest.raises(IndexError):
        writer.mark(extents, HeaderState.FREE, range(1, 5))
    with pytest.raises(IndexError, match=f"pages {PAGES - 1} to {PAGES + 1} are not all below"):
        writer.keep(range(PAGES - 1, PAGES + 1), 5_000)
    assert not table.mapped.any()


def test_sequences_and_tokens_must_fit_the_pages() -> None:
    table = table_for()
    writer, extents = HeaderWriter(table), pack_extents([0, 1])
    with pytest.raises(ValueError, match="3 sequences for 2 pages"):
        writer.mark(extents, HeaderState.FREE, range(1, 4))
    with pytest.raises(ValueError, match="12 bytes are not as many tokens for 2 pages"):
        writer.write(extents, HeaderState.HELD, range(1, 3), writer=1, root=0, tokens=bytes(12))
    with pytest.raises(ValueError, match="4 bytes are not as many tokens for 0 pages"):
        writer.write(range(0), HeaderState.HELD, range(0), writer=1, root=0, tokens=bytes(4))
    with pytest.raises(ValueError, match="8 bytes are not 2 sequences of 64 bits"):
        writer.mark(extents, HeaderState.FREE, np.array([1, 2], np.uint32).tobytes())
    with pytest.raises(ValueError, match="have gaps"):
        writer.mark(extents, HeaderState.FREE, range(9, 5, -2))
    for pages in (range(-1, 1), range(1 << 32, (1 << 32) + 2), range(0, 4, 2)):
        with pytest.raises(IndexError, match="no run of a pool's pages"):
            writer.mark(pages, HeaderState.FREE, range(1, 3))
    with pytest.raises(ValueError, match="12 bytes are no extents"):
        writer.mark(bytes(12), HeaderState.FREE, range(1, 3))
    much = 2 * PAGE_SIZE
    with pytest.raises(ValueError, match="more tokens than a header holds"):
        writer.write(
            extents, HeaderState.HELD, range(1, 3), writer=1, root=0, tokens=bytes(8 * much)
        )
    assert not table.mapped.any()
