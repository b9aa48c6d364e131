"""Tool calls in OpenAI's JSON: of a whole answer, and of a stream's chunks. Pure."""

from __future__ import annotations

import hashlib
from typing import Any

from pagemesh.gateway.api.openai_api import Ask
from pagemesh.gateway.api.tool_grammar import tool_format
from pagemesh.gateway.words.tokens import Tokens
from pagemesh.gateway.words.tool_calls import (
    CallBegun,
    CallEnded,
    CallWrote,
    Said,
    ToolCallParser,
    ToolEvent,
)


class ToolParts:
    """The calls of one response's choices. Their ids are made from ``response_id``."""

    def __init__(self, ask: Ask, tokens: Tokens, response_id: str) -> None:
        use = ask.tools
        assert use is not None
        self._form = tool_format(tokens)
        self._is_named = use.choice == "named"
        self._leads = use.leads
        self._response_id = response_id
        self._parsers: dict[int, ToolCallParser] = {}
        """Of the choices that are streamed."""

    def _parser(self) -> ToolCallParser:
        return ToolCallParser(self._form, leads=self._leads)

    def message(self, index: int, text: str, finish: str) -> tuple[dict[str, Any], str]:
        """The message of a whole choice, which wrote ``text`` and ended with ``finish``; and the
        reason for its end."""
        parser = self._parser()
        delta = self._delta(index, [*parser.push(text), *parser.close()])
        message: dict[str, Any] = {
            "role": "assistant",
            "content": delta.get("content"),
            "refusal": None,
        }
        if "tool_calls" in delta:
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"}
                for call in delta["tool_calls"]
            ]
        return message, self._finish(parser, finish)

    def delta(self, index: int, text: str) -> dict[str, Any]:
        """What ``text`` adds to a streamed choice; empty while it may be the beginning of a
        call."""
        if index not in self._parsers:
            self._parsers[index] = self._parser()
        return self._delta(index, self._parsers[index].push(text))

    def last_delta(self, index: int, text: str, finish: str) -> tuple[dict[str, Any], str]:
        """What the end of a streamed choice adds, and the reason for it."""
        parser = self._parsers.pop(index, None) or self._parser()
        delta = self._delta(index, [*parser.push(text), *parser.close()])
        return delta, self._finish(parser, finish)

    def _finish(self, parser: ToolCallParser, finish: str) -> str:
        """OpenAI gives calls as the reason, unless the one that was made had been asked for."""
        made = parser.call_count and not parser.is_open and not self._is_named
        return "tool_calls" if made and finish == "stop" else finish

    def _delta(self, index: int, events: list[ToolEvent]) -> dict[str, Any]:
        texts: list[str] = []
        calls: dict[int, dict[str, Any]] = {}
        pieces: dict[int, list[str]] = {}
        for event in events:
            match event:
                case Said(text):
                    texts.append(text)
                case CallBegun(number, name):
                    calls[number] = {
                        "index": number,
                        "id": self._id(index, number),
                        "type": "function",
                        "function": {"name": name},
                    }
                    pieces[number] = []
                case CallWrote(number, text):
                    calls.setdefault(number, {"index": number, "function": {}})
                    pieces.setdefault(number, []).append(text)
                case CallEnded():
                    pass
        for number, call in calls.items():
            call["function"]["arguments"] = "".join(pieces[number])
        out: dict[str, Any] = {"content": "".join(texts)} if texts else {}
        return out | ({"tool_calls": list(calls.values())} if calls else {})

    def _id(self, index: int, number: int) -> str:
        of = f"{self._response_id}/{index}/{number}".encode()
        made = hashlib.blake2b(of, digest_size=12).hexdigest()
        return made[: self._form.id_letters] or f"call_{made}"
