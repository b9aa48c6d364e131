"""Finds the calls in what a model writes, as it comes. Pure.

         begin mark           name and key of the arguments       end of their object
[text] --------------> [head] -----------------------------> [arguments] ------> [tail]
   ^                      | is none: it was text                                     |
   +----------------------+<---------------------------------------------------------+
                                                                         end mark
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from pagemesh.gateway.words.stops import overlap
from pagemesh.gateway.words.tool_formats import ToolFormat

_SPACE = r"[ \t\r\n]*"
_NAME = r"[a-zA-Z0-9_-]"
_NAME_MAX = 64
_LIST_TAIL = re.compile(r"[\s}]*([^\s}])")
"""Up to the first letter that goes on with a list of calls, or ends it."""
_PLAIN = re.compile(r'[^"\\{}\[\]]+')
"""What ends no string and no object."""


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallWrote:
    """A piece of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    index: int


ToolEvent = Said | CallBegun | CallWrote | CallEnded


class ToolCallParser:
    """One answer. However its text is cut into pieces, the events say the same. What is no call
    is text; what may be the beginning of one is held back.

    ``leads``: an answer is either calls or text, as its first characters say; a mark later on is
    text. Otherwise calls may follow text.
    """

    def __init__(self, form: ToolFormat, *, leads: bool = False) -> None:
        self._form = form
        self._leads = leads or not form.follows_text
        self._first = form.mark or "{"
        self._head, self._part_of_head = _heads(form, again=False)
        self._part: Callable[[], Iterator[ToolEvent]]
        self._part = self._start if self._leads else self._text
        self._held = ""
        self._after_call = False
        """Blanks between calls and behind them are no text."""
        self._json = _JsonEnd()
        self._unread_mark = form.mark
        """The mark before what may be a call's head: text, if it is none."""
        self.call_count = 0
        self.is_open = False
        """A call was begun and has not ended."""

    def push(self, text: str) -> list[ToolEvent]:
        """What ``text`` adds. Costs time in proportion to it, not to what came before."""
        self._held += text
        out: list[ToolEvent] = []
        moves = True
        while moves and self._held:
            part = self._part
            out += part()
            moves = self._part != part
        return out

    def close(self) -> list[ToolEvent]:
        """The answer has ended: what was held back is text, unless it belongs to a call."""
        held, self._held = self._held, ""
        if self._part == self._find_head:
            held = self._unread_mark + held
        elif self._part == self._tail:
            held = ""
        return [Said(held)] if held and not (self._after_call and held.isspace()) else []

    # Each part takes what it can from what is held, and may give way to another ----------------

    def _start(self) -> Iterator[ToolEvent]:
        """Of an answer that is calls or text."""
        if self._first.startswith(self._held) and self._held != self._first:
            return
        if not self._held.startswith(self._first):
            self._part = self._rest
            return
        self._held = self._held.removeprefix(self._form.mark)
        self._expect_head()
        yield from ()

    def _rest(self) -> Iterator[ToolEvent]:
        """Text to the end."""
        held, self._held = self._held, ""
        yield Said(held)

    def _text(self) -> Iterator[ToolEvent]:
        mark = self._form.mark
        if self._after_call:
            self._held = self._held.lstrip(" \t\r\n")
        at = self._held.find(mark)
        if at >= 0:
            before = self._held[:at].removesuffix(self._form.gap)
            self._held = self._held[at + len(mark) :]
            self._expect_head()
        else:
            keep = max(overlap(self._held, one) for one in (mark, self._form.gap + mark))
            before = self._held[: len(self._held) - keep]
            self._held = self._held[len(before) :]
        if before:
            self._after_call = False
            yield Said(before)

    def _expect_head(self, *, again: bool = False) -> None:
        """``again``: of a further call in a list."""
        self._part = self._find_head
        self._unread_mark = "" if again else self._form.mark
        self._head, self._part_of_head = _heads(self._form, again=again)

    def _find_head(self) -> Iterator[ToolEvent]:
        found = self._head.match(self._held)
        if found:
            self._held = self._held[found.end() :]
            self._part, self._json = self._arguments, _JsonEnd()
            self._after_call, self.is_open = False, True
            self.call_count += 1
            yield CallBegun(self.call_count - 1, found.group(1))
        elif not self._part_of_head.fullmatch(self._held):
            self._part = self._rest if self._leads else self._text
            self._after_call = False
            if self._unread_mark:
                yield Said(self._unread_mark)

    def _arguments(self) -> Iterator[ToolEvent]:
        length = self._json.length(self._held)
        text, self._held = self._held[:length], self._held[length:]
        if text:
            yield CallWrote(self.call_count - 1, text)
        if self._json.ended:
            self._part, self.is_open = self._tail, False
            if self._form.style == "named":
                self._part, self._after_call = self._text, True
            yield CallEnded(self.call_count - 1)

    def _tail(self) -> Iterator[ToolEvent]:
        """What closes the call."""
        if self._form.style == "list":
            self._list_tail()
            return
        mark = self._form.end_mark
        at = self._held.find(mark) if mark else -1
        if at < 0:
            self._held = self._held[len(self._held) - overlap(self._held, mark) :]
            return
        self._held = self._held[at + len(mark) :]
        self._part, self._after_call = self._text, True
        yield from ()

    def _list_tail(self) -> None:
        """The end of a call in a list, and of the list."""
        found = _LIST_TAIL.match(self._held)
        if found is None:
            return  # it is not all there
        self._held = self._held[found.start(1) :]
        if found.group(1) == ",":
            self._expect_head(again=True)
        else:
            self._held = self._held.removeprefix("]")
            self._part, self._after_call = self._text, True


class _JsonEnd:
    """Where a JSON value ends, found as it comes."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escapes = False
        self.ended = False

    def length(self, text: str) -> int:
        """How much of ``text`` belongs to the value."""
        at = 0
        while at < len(text):
            if self._escapes:
                self._escapes, at = False, at + 1
                continue
            plain = _PLAIN.match(text, at)
            if plain:
                at = plain.end()
                continue
            if self._closes(text[at]):
                self.ended = True
                return at + (self._depth == 0)
            at += 1
        return at

    def _closes(self, letter: str) -> bool:
        """Take a letter that means something; whether the value ends with it, or before it
        (``depth`` below 0)."""
        if letter == "\\":
            self._escapes = self._in_string
        elif letter == '"':
            self._in_string = not self._in_string
        elif not self._in_string:
            self._depth += 1 if letter in "{[" else -1
            return self._depth <= 0 and letter in "}]"
        return False


@lru_cache(16)
def _heads(form: ToolFormat, *, again: bool) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns for what comes before the arguments, up to their first letter, and for what may
    become that. ``again``: of a further call in a list."""
    words: tuple[str, ...] = ()
    more: tuple[str, ...] = (form.second_mark,)
    if form.style != "named":
        words = ("{", '"name"', ":", '"')
        more = ('"', ",", f'"{form.key}"', ":")
    if form.style == "list":
        words = ("," if again else "[", *words)
    whole = _SPACE.join(["", *map(re.escape, words)])
    whole += f"({_NAME}{{1,{_NAME_MAX}}})" + _SPACE.join([*map(re.escape, more), r"(?=\S)"])
    rest = _SPACE
    for word in reversed(more):
        rest = _begun(word, rest, spaced=word != '"')
    rest = f"{_NAME}{{0,{_NAME_MAX}}}(?:{rest})?"
    for word in reversed(words):
        rest = _begun(word, rest, spaced=True)
    return re.compile(whole), re.compile(rest)


def _begun(word: str, rest: str, *, spaced: bool) -> str:
    """``word`` and ``rest``, or the beginning of ``word``."""
    out = rest
    for letter in reversed(word):
        out = f"(?:{re.escape(letter)}{out})?"
    return (_SPACE if spaced else "") + out
