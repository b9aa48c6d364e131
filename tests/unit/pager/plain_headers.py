"""Page headers as plain arrays, like those of a pool file, for tests to inspect and to damage."""

from __future__ import annotations

import numpy as np
from tests.support.ledger_numbers import each_of

from pagemesh.pager.events import Command, HeaderTable, KeepUntil, SetStates, WriteHeaders
from pagemesh.pager.pages.runs import table_of
from pagemesh.pager.tree.lifetime import FOREVER_MS
from pagemesh.wire.pool_format import HeaderState


def blank(page_count: int, page_size: int) -> HeaderTable:
    """The headers of a new pool."""
    u64 = np.zeros(page_count, np.uint64)
    u32 = np.zeros(page_count, np.uint32)
    return HeaderTable(
        np.zeros(page_count, np.uint8), u64.copy(), u64.copy(), u64.copy(), u64.copy(),
        u32.copy(), u32.copy(), np.zeros((page_count, page_size), np.uint32),
        np.full(page_count, FOREVER_MS),
    )  # fmt: skip


def write(headers: HeaderTable, command: Command) -> None:
    """Perform ``command`` if it is about headers."""
    if not isinstance(command, WriteHeaders | SetStates | KeepUntil):
        return
    pages = table_of(command.pages)
    if isinstance(command, KeepUntil):
        assert (headers.states[pages] == HeaderState.COMMITTED).all()
        headers.until_ms[pages] = np.maximum(headers.until_ms[pages], command.until_ms)
        return
    headers.states[pages] = command.state
    headers.sequences[pages] = each_of(command.sequences)
    if isinstance(command, SetStates):
        if command.state == HeaderState.FREE:
            headers.tokens[pages[headers.until_ms[pages] < FOREVER_MS]] = 0
        return
    headers.identities[pages] = command.identities
    headers.parents[pages] = command.parents
    headers.writers[pages] = command.writer
    headers.roots[pages] = command.root
    headers.counts[pages] = command.token_count
    headers.until_ms[pages] = command.until_ms
    headers.tokens[pages] = 0
    if command.tokens:
        ids = np.frombuffer(command.tokens, np.uint32)
        headers.tokens[pages] = ids.reshape(len(pages), -1)
