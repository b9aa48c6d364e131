"""How far ahead of its computation a prompt gets its pages.

    |.. filled ..|.. current step ..|.. next chunk ..|.. one more ..|        promised        |
                                   end              low           wanted                   whole

When a step begins, a prompt that has fewer slots than ``low`` asks for more, up to ``wanted``. The
answer then has the whole step to arrive, and with two chunks at a time only every other step needs
a call. The last call also asks for the slots into which the sequence will grow.
"""

from __future__ import annotations


def first_part(chunk_tokens: int, chunks: int) -> int:
    """Slots beyond the cached ones that an admission asks for at once; 0: all."""
    return chunks * chunk_tokens


def next_part(
    end: int, length: int, whole: int, *, chunk_tokens: int, chunks: int
) -> tuple[int, int]:
    """``low`` and ``wanted`` for a prompt of ``length`` tokens of which ``end`` will be computed
    when the current step has ended, and that has ``whole`` slots reserved."""
    wanted = end + chunks * chunk_tokens
    if not chunks or 2 * (whole - wanted) <= chunks * chunk_tokens:
        wanted = whole  # a short rest is not worth a call
    return min(end + chunk_tokens, length), wanted
