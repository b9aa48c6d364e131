"""Who last wrote pages that no lease has: the books have forgotten it, but page headers tell."""

from __future__ import annotations

import msgspec

from pagemesh.pager.books import Books
from pagemesh.pager.storage.pool_store import PoolStore
from pagemesh.pager.tiers.load import PAGER
from pagemesh.wire.messages import Message
from pagemesh.wire.pager_reports import LedgerFault, PagerReport


def named(message: Message, store: PoolStore, books: Books) -> Message:
    """``message``; in a report, faults without an owner name the last writers of their pages."""
    if type(message) is not PagerReport or not message.faults:
        return message
    faults = [
        fault if fault.owner else _with_owner(fault, store, books) for fault in message.faults
    ]
    return msgspec.structs.replace(message, faults=faults)


def _with_owner(fault: LedgerFault, store: PoolStore, books: Books) -> LedgerFault:
    headers = store.file.headers
    writers = [int(headers.scan(page, 1).batch.writers[0]) for page in fault.pages]
    names = [_name(books, writer) for writer in dict.fromkeys(writers)]
    return msgspec.structs.replace(fault, owner=", ".join(names))


def _name(books: Books, writer: int) -> str:
    if writer == PAGER:
        return "the pager"
    session = books.sessions.get(writer)
    return session.worker if session is not None and session.worker else f"incarnation {writer:x}"
