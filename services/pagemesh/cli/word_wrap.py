"""Text that comes in pieces, wrapped at words for a terminal.

A word is held back until it is whole, which is one piece later, since nobody can know before
where it ends. What is longer than a line is left to the terminal, so that a URL stays one.
"""

from __future__ import annotations

from rich.cells import cell_len

_TAB_COLUMNS = 8


class WordWrap:
    """``feed`` pieces and print what it gives; print what ``end`` gives last. ``width`` is in
    columns of the terminal."""

    def __init__(self, width: int) -> None:
        self._width = max(1, width)
        self._column = 0
        self._spaces = ""
        self._word = ""
        self._overlong = False
        """The word under way is longer than a line: its characters go out as they come."""

    def feed(self, piece: str) -> str:
        """What to print now."""
        return "".join(self._take(character) for character in piece)

    def end(self) -> str:
        """The last word, and what is behind it."""
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
        if cell_len(character) == 2:  # Chinese and its kin: a line may break at each of them
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
        """The word under way, on this line or the next; spaces at a break vanish."""
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
