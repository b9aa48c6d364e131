"""Numbers with their nouns, for people, and what people typed."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """``0 pages``, ``1 page``, ``2 pages``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def typed(text: str) -> str:
    """What somebody typed or named on a command line, of which Python marks the bytes that it could
    not read: those that are no UTF-8 become a mark that JSON can hold."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
