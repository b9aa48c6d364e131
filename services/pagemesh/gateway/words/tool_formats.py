"""How models write calls of functions, as far as their chat templates tell. Pure.

hermes       <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>   after text, repeated
mistral      [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]           after text
mistral-args [TOOL_CALLS]f[ARGS]{...}                                        after text, repeated
llama3       {"name": "f", "parameters": {...}}                              the whole answer
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is ``begin``, ``{"name": "f", "<key>": {...}}``, ``end``. Without ``begin`` a call is
    the whole answer, which is a call if it begins with a brace."""

    name: str
    key: str
    """The member that holds the arguments."""
    mark: str = ""
    """What calls are known by: ``begin`` without its line end."""
    gap: str = ""
    """Between a mark and the call's JSON, and between calls."""
    end_mark: str = ""
    style: Literal["object", "list", "named"] = "object"
    """``list``: one mark before a list of all calls. ``named``: behind the mark, the name, a second
    mark and nothing but the arguments."""
    second_mark: str = ""
    id_letters: int = 0
    """Not 0: templates take ids of calls with just so many letters and digits."""

    @property
    def begin(self) -> str:
        return self.mark + self.gap

    @property
    def end(self) -> str:
        return self.gap + self.end_mark

    @property
    def follows_text(self) -> bool:
        """Whether calls may come after text, and several of them."""
        return bool(self.mark)

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(one for one in (self.mark, self.second_mark, self.end_mark) if one)


HERMES = ToolFormat("hermes", "arguments", "<tool_call>", "\n", "</tool_call>")
MISTRAL = ToolFormat("mistral", "arguments", "[TOOL_CALLS]", style="list", id_letters=9)
MISTRAL_ARGS = ToolFormat(
    "mistral-args", "arguments", "[TOOL_CALLS]", style="named", second_mark="[ARGS]", id_letters=9
)
LLAMA3 = ToolFormat("llama3", "parameters")

_OTHER_MARKS = ("<function=", "<arg_key>", "<tool_calls>", "[CALL_ID]")
"""Of formats that have something in common with ours, and are others."""
_TAKES_TOOLS = re.compile(r"\btools\b")


class NoToolFormat(Exception):
    """The model cannot be asked to call functions; the message may be shown."""


@lru_cache(8)
def format_of(template: str) -> ToolFormat:
    """The format that a chat template's source shows. Raises ``NoToolFormat``."""
    if not _TAKES_TOOLS.search(template):
        raise NoToolFormat("this model's chat template has no place for tools")
    source = template.replace('\\"', '"')
    other = next((mark for mark in _OTHER_MARKS if mark in source), "")
    if other:
        raise NoToolFormat(f"this model writes tool calls with {other}, which is not supported yet")
    if MISTRAL.mark in source:
        return MISTRAL_ARGS if MISTRAL_ARGS.second_mark in source else MISTRAL
    if HERMES.mark in source and '"arguments"' in source:
        return HERMES
    if '{"name": ' in source and '"parameters": ' in source:
        return LLAMA3
    raise NoToolFormat("how this model writes tool calls is not known from its chat template")
