"""The output items of a response as they come, and the events of a stream that tell of them. Pure.

    text         [message]       added, part added, delta ..., done, part done, item done
    a call       [function_call] added, delta ..., done, item done

An item is open until the next one begins or the answer ends. A whole response has the items that
the events of a stream tell of, since both are made here.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from pagemesh.gateway.api.openai_api import Ask
from pagemesh.gateway.api.render import ANSWER_BYTES_MAX, too_large
from pagemesh.gateway.api.scores import ChatScores, Offsets, Written
from pagemesh.gateway.api.tool_grammar import tool_format
from pagemesh.gateway.calls.events import ChoiceEnded, Deliver
from pagemesh.gateway.words.tokens import Tokens
from pagemesh.gateway.words.tool_calls import (
    CallBegun,
    CallEnded,
    CallWrote,
    Said,
    ToolCallParser,
    ToolEvent,
)

Status = Literal["in_progress", "completed", "incomplete"]
Events = Iterator[dict[str, Any]]
"""Events of a stream, without their numbers; ``type`` comes first."""
_DELTA = {"message": "response.output_text", "function_call": "response.function_call_arguments"}


@dataclass(slots=True)
class _Item:
    """A message or a call; ``texts`` are those of the message, or of the call's arguments."""

    kind: Literal["message", "function_call"]
    id: str
    index: int
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)
    """Log-probabilities of the text, in JSON."""
    status: Status = "in_progress"

    @property
    def place(self) -> dict[str, Any]:
        found: dict[str, Any] = {"item_id": self.id, "output_index": self.index}
        return found | ({"content_index": 0} if self.kind == "message" else {})

    def part(self) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": "".join(self.texts),
            "annotations": [],
            "logprobs": _rows(self.rows),
        }

    def json(self) -> dict[str, Any]:
        told: dict[str, Any] = {"type": self.kind, "id": self.id, "status": self.status}
        if self.kind == "message":
            begun = self.status == "in_progress"
            return told | {"role": "assistant", "content": [] if begun else [self.part()]}
        arguments = "".join(self.texts)
        return told | {"call_id": self.call_id, "name": self.name, "arguments": arguments}


class Items:
    """One response's items. Their ids are made from ``response_id``."""

    def __init__(
        self, ask: Ask, tokens: Tokens, response_id: str, bytes_max: int = ANSWER_BYTES_MAX
    ) -> None:
        self._response_id = response_id
        self._bytes_max = bytes_max
        self._items: list[_Item] = []
        self._parser: ToolCallParser | None = None
        if ask.tools is not None:
            self._parser = ToolCallParser(tool_format(tokens), leads=ask.tools.leads)
        self._scores: _Scores | None = None
        if ask.logprobs is not None:
            self._scores = _Scores(tokens.written, shows_special=not ask.skip_special_tokens)
        self._said_characters = 0
        self.size_bytes = 0
        """About what the items take in JSON so far."""
        self.finish: Literal["stop", "length"] = "stop"

    def json(self) -> list[dict[str, Any]]:
        """The items, once the answer has ended."""
        return [item.json() for item in self._items]

    def delivered(self, event: Deliver) -> Events:
        """Raises ``ApiError`` when the answer becomes too large to be kept, as it is until its
        end."""
        if self._scores is not None:
            self._scores.add(event)
        yield from self._wrote(event.text)

    def ended(self, event: ChoiceEnded) -> Events:
        """As ``delivered``. The last item is still open, until ``close``."""
        self.finish = event.finish
        yield from self._wrote(event.text)
        for part in self._parser.close() if self._parser is not None else ():
            yield from self._took(part)
        if self._scores is not None and self._open is not None and self._open.kind == "message":
            if rows := self._scores.take(None):
                yield self._delta(self._open, "", rows)

    def close(self) -> Events:
        """The answer is over."""
        if self._open is not None:
            is_whole = self._open.kind == "message" and self.finish == "stop"
            yield from self._done("completed" if is_whole else "incomplete")

    @property
    def _open(self) -> _Item | None:
        last = self._items[-1] if self._items else None
        return last if last is not None and last.status == "in_progress" else None

    def _wrote(self, text: str) -> Events:
        if not text:
            return
        self._grown(len(text))
        events: list[ToolEvent]
        events = [Said(text)] if self._parser is None else self._parser.push(text)
        for event in events:
            yield from self._took(event)

    def _took(self, event: ToolEvent) -> Events:
        match event:
            case Said(text):
                yield from self._said(text)
            case CallBegun(_, name):
                yield from self._done("completed")
                if self._scores is not None:
                    self._scores.leave()
                yield self._begun("function_call", name)
            case CallWrote(_, text):
                assert self._open is not None
                yield self._delta(self._open, text, [])
            case CallEnded():
                yield from self._done("completed")

    def _said(self, text: str) -> Events:
        item = self._open
        if item is None:
            yield self._begun("message")
            item = self._items[-1]
            yield {"type": "response.content_part.added", **item.place, "part": item.part()}
        self._said_characters += len(text)
        rows = [] if self._scores is None else self._scores.take(self._said_characters)
        yield self._delta(item, text, rows)

    def _begun(self, kind: Literal["message", "function_call"], name: str = "") -> dict[str, Any]:
        index = len(self._items)
        prefix = "msg" if kind == "message" else "fc"
        item = _Item(kind, self._id(prefix, index), index, self._id("call", index), name)
        self._items.append(item)
        added = {"output_index": index, "item": item.json()}
        return {"type": "response.output_item.added", **added}

    def _delta(self, item: _Item, text: str, rows: list[bytes]) -> dict[str, Any]:
        item.texts.append(text)
        event: dict[str, Any] = {"type": f"{_DELTA[item.kind]}.delta", **item.place, "delta": text}
        if item.kind == "message":
            item.rows += rows
            self._grown(sum(map(len, rows)))
            event["logprobs"] = _rows(rows)
        return event

    def _done(self, status: Literal["completed", "incomplete"]) -> Events:
        """Of the open item, if there is one."""
        item = self._open
        if item is None:
            return
        item.status = status
        kind, text = f"{_DELTA[item.kind]}.done", "".join(item.texts)
        if item.kind == "message":
            yield {"type": kind, **item.place, "text": text, "logprobs": _rows(item.rows)}
            yield {"type": "response.content_part.done", **item.place, "part": item.part()}
        else:
            yield {"type": kind, **item.place, "name": item.name, "arguments": text}
        told = {"output_index": item.index, "item": item.json()}
        yield {"type": "response.output_item.done", **told}

    def _grown(self, by_bytes: int) -> None:
        self.size_bytes += by_bytes
        if self.size_bytes > self._bytes_max:
            raise too_large(self._bytes_max)

    def _id(self, prefix: str, index: int) -> str:
        of = f"{self._response_id}/{prefix}/{index}".encode()
        return f"{prefix}_{hashlib.blake2b(of, digest_size=12).hexdigest()}"


class _Scores:
    """Log-probabilities that wait for the text of their tokens: what belongs to a call, and to its
    mark, is no text."""

    def __init__(self, written: Callable[[int], Written], *, shows_special: bool) -> None:
        self._written = written
        self._shows_special = shows_special
        self._offsets = Offsets()
        self._waiting: deque[tuple[int, bytes]] = deque()
        """With the character at which each token begins."""
        self._is_over = False

    def add(self, event: Deliver) -> None:
        """The tokens of ``event`` that are shown. Scores that were lost with a worker are left
        out."""
        if self._is_over:
            return
        tokens = event.tokens[: len(event.tokens) - event.hidden_count].tolist()
        known = [self._written(token) for token in tokens]
        shown = [b"" if one.is_special and not self._shows_special else one.raw for one in known]
        offsets = self._offsets.of(shown)
        if event.logprobs is not None:
            scores = ChatScores(self._written)
            scores.add(tokens, event.logprobs)
            self._waiting.extend(zip(offsets, scores.rows, strict=False))

    def take(self, characters: int | None) -> list[bytes]:
        """Those of tokens that begin within the first ``characters``; None: all."""
        rows: list[bytes] = []
        while self._waiting and (characters is None or self._waiting[0][0] < characters):
            rows.append(self._waiting.popleft()[1])
        return rows

    def leave(self) -> None:
        """No more text comes."""
        self._waiting.clear()
        self._is_over = True


def _rows(rows: list[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[%b]" % b",".join(rows))
