"""Wraps streamed text at words, for a terminal.

A word is held back until it is known to be complete, which is usually one piece later. A word that
is longer than a line is left for the terminal to wrap, so that a URL stays in one piece.
"""

from __future__ import annotations

from rich.cells import cell_len

_TAB_COLUMNS = 8


class WordWrap:
    """``feed`` it pieces and print what it returns, then print what ``end`` returns. ``width`` is
    in columns of the terminal."""

    def __init__(self, width: int) -> None:
        self._width = max(1, width)
        self._column = 0
        self._spaces = ""
        self._word = ""
        self._overlong = False
        """The current word is longer than a line, so its characters are returned as they come."""

    def feed(self, piece: str) -> str:
        """Take a piece of text; returns what can be printed now."""
        return "".join(self._take(character) for character in piece)

    def end(self) -> str:
        """The last word, and the spaces after it."""
        out = self._flush() + self._spaces
        self._spaces = ""
        return out

    def _take(self, character: str) -> str:
        if character == "\n":
            out = self._flush() + self._spaces + character
            self._column, self._spaces = 0, ""
            return out
        if character.isspace() and character != "\u00a0":
            out = self._flush()
            self._spaces += character
            return out
        if self._overlong:
            return character
        if cell_len(character) == 2:  # Chinese, Japanese, ...: a line may break before or after
            out = self._flush()
            self._word = character
            return out + self._flush()
        self._word += character
        if cell_len(self._word) < self._width:
            return ""
        out = self._flush()
        self._overlong = True
        return out

    def _flush(self) -> str:
        """The current word, on this line or the next; spaces at a break are dropped."""
        self._overlong = False
        if not self._word:
            return ""
        word, spaces = self._word, self._spaces
        self._word = self._spaces = ""
        blank = sum(_TAB_COLUMNS if space == "\t" else 1 for space in spaces)
        columns = cell_len(word)
        if self._column and self._column + blank + columns > self._width:
            self._column = columns
            return "\n" + word
        self._column += blank + columns
        return spaces + word
