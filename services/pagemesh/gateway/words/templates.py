"""Chat templates, rendered in a sandbox with bounds on work, time and size.

Templates come with models and their arguments from clients; neither is trusted. A template may do
what ``transformers`` lets it do, except what would take memory without bounds: all loops and macros
share one budget of turns and time, joining and repeating text share another of characters, and
padding and formatting are refused.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn, cast

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

TURNS_MAX = 200_000
"""Loop turns and calls of macros in one rendering, in total."""
RENDER_S_MAX = 2.0
CHARACTERS_MAX = 128 << 20
"""Characters (or list items) that one rendering may make by joining, adding and repeating."""
_INDENT_MAX = 16
_ATTRIBUTES_REFUSED = frozenset(
    {"ljust", "rjust", "center", "zfill", "expandtabs", "format", "format_map", "translate"}
)
_FILTERS_REFUSED = (
    "batch", "center", "format", "indent", "pprint", "slice", "urlize", "wordwrap", "xmlattr",
)  # fmt: skip


class TemplateRefused(Exception):
    """The template, or what it was given, is at fault; the message may be shown."""


class _Budget(threading.local):
    """What the rendering on this thread has used up."""

    turns = 0
    characters = 0
    until = 0.0

    def open(self) -> None:
        self.turns = self.characters = 0
        self.until = time.monotonic() + RENDER_S_MAX

    def turn(self) -> None:
        self.turns += 1
        if self.turns > TURNS_MAX or time.monotonic() > self.until:
            raise SecurityError("the chat template loops too often")

    def check_time(self) -> None:
        if time.monotonic() > self.until:
            raise SecurityError("the chat template takes too long")

    def charge(self, characters: int) -> None:
        self.characters += characters
        if self.characters > CHARACTERS_MAX:
            raise SecurityError("the chat template produces too much text")


_budget = _Budget()


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _budget.turn()
        yield item


def _joined(parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    _budget.charge(sum(map(len, texts)))
    return "".join(texts)


def _finalized(value: Any) -> Any:
    if isinstance(value, str):
        _budget.charge(len(value))
    return value


def _join_filter(value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    items = list(value)
    if attribute is not None:
        items = [item[attribute] for item in items]
    texts = [str(item) for item in items]
    _budget.charge(sum(map(len, texts)) + len(str(d)) * len(texts))
    return str(d).join(texts)


def _replace_filter(value: object, old: str, new: str, count: int = -1) -> str:
    text = str(value)
    _charge_replace(text, str(new))
    return text.replace(str(old), str(new), -1 if count is None else count)


def _charge_replace(text: str, new: str) -> None:
    _budget.charge((len(text) + 1) * max(1, len(new)))


class _GuardTree(NodeTransformer):
    """Charges the budget for the items of loops and for what ``~`` joins."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "pagemesh_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "pagemesh_joined")


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it has no effect."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _ATTRIBUTES_REFUSED:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is type(right) is str:  # the most frequent case
            _budget.charge(len(left) + len(right))
            return left + right
        sized = hasattr(left, "__len__"), hasattr(right, "__len__")
        if operator == "+" and all(sized):
            _budget.charge(len(left) + len(right))
        elif operator == "*" and any(sized):
            count, items = (left, right) if sized[1] else (right, left)
            _budget.charge(len(items) * max(0, count) if isinstance(count, int) else 0)
        elif operator == "*" and not (_within(left, 1 << 4096) and _within(right, 1 << 4096)):
            raise SecurityError("the chat template multiplies numbers that are too large")
        elif operator == "**" and not (_within(left, 64) and _within(right, 64)):
            raise SecurityError("the chat template raises a number to too high a power")
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("the chat template may not format strings with %")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(__obj, Macro | LoopContext):  # these may recurse, and branch
            _budget.turn()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            name = getattr(__obj, "__name__", "")
            if name == "replace" and len(args) > 1:
                _charge_replace(owner, str(args[1]))
            elif name == "join" and args:
                args = ([str(item) for item in args[0]], *args[1:])
                _budget.charge(sum(len(item) + len(owner) for item in args[0]))
        return super().call(__context, __obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        guarded: nodes.Template = _GuardTree().visit(tree)
        return guarded


def _within(value: Any, limit: int) -> bool:
    return isinstance(value, int | float) and abs(value) <= limit


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefused(str(message)[:500])


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As ``transformers`` has it."""
    if isinstance(indent, int) and indent > _INDENT_MAX:  # made as a text before it is charged
        raise SecurityError(f"the chat template indents by more than {_INDENT_MAX}")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        text = encoder.encode(value)
        _budget.charge(len(text))
        return text
    parts: list[str] = []
    for part in encoder.iterencode(value):  # deep nesting makes far more of it than there is
        _budget.charge(len(part))
        _budget.check_time()
        parts.append(part)
    return "".join(parts)


def _strftime_now(now: Callable[[], datetime]) -> Callable[[str], str]:
    def strftime_now(form: str) -> str:
        _budget.charge(64 * len(form))
        return now().strftime(form)

    return strftime_now


class ChatTemplate:
    """One model's template. Raises ``TemplateRefused`` when its syntax is wrong.

    ``special_tokens`` are the named ones a template may use (``bos_token``, ...); ``now`` is the
    clock of ``strftime_now``.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._special_tokens = dict(special_tokens)
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_finalized,
        )
        environment.filters |= {
            "pagemesh_counted": _counted,
            "pagemesh_joined": _joined,
            "join": _join_filter,
            "replace": _replace_filter,
            "tojson": _tojson,
        }
        for name in _FILTERS_REFUSED:
            environment.filters.pop(name, None)
        environment.globals.pop("lipsum", None)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now(now)
        self._template = _compile(environment, source)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. ``extra`` are further variables; they replace neither special tokens nor
        arguments."""
        values: dict[str, Any] = {"tools": None, "documents": None, **(extra or {})}
        values |= self._special_tokens
        values |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        _budget.open()
        try:
            return self._template.render(**values)
        except TemplateRefused:
            raise
        except (TemplateError, RecursionError, ArithmeticError, MemoryError) as error:
            raise TemplateRefused(f"the chat template failed: {type(error).__name__}") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise TemplateRefused(f"the chat template failed: {type(error).__name__}") from None


def _compile(environment: Environment, source: str) -> Template:
    try:
        return environment.from_string(source)
    except (TemplateError, RecursionError) as error:
        raise TemplateRefused(f"the chat template does not parse: {error}"[:500]) from None
