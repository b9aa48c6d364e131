"""Counts with their nouns for output, and text from the command line."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """``0 pages``, ``1 page``, ``2 pages``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def typed(text: str) -> str:
    """``text`` from a command line or terminal with each byte that is not UTF-8, which Python reads
    as a surrogate escape, as a replacement character: JSON can hold that."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
