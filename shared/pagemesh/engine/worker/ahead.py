"""How far ahead of its computation a prompt has pages.

    |.. filled ..|.. step at hand ..|.. next chunk ..|.. one more ..|        promised        |
                                   end              low           wanted                   whole

With fewer slots than ``low`` it asks for more, up to ``wanted``, when the step at hand begins: so
the answer has all of that step to come in, and with two chunks at a time every other step passes
without a call. The last part takes the growth of the answer along.
"""

from __future__ import annotations


def first_part(chunk_tokens: int, chunks: int) -> int:
    """Slots, beyond what is cached, that an admission asks for at once; 0: all."""
    return chunks * chunk_tokens


def next_part(
    end: int, length: int, whole: int, *, chunk_tokens: int, chunks: int
) -> tuple[int, int]:
    """``low`` and ``wanted`` for a prompt of ``length`` tokens of which ``end`` will be computed
    when the step at hand has ended, and that has ``whole`` slots reserved."""
    wanted = end + chunks * chunk_tokens
    if not chunks or 2 * (whole - wanted) <= chunks * chunk_tokens:
        wanted = whole  # a short rest is not worth a call
    return min(end + chunk_tokens, length), wanted
