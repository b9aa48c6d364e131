"""What an answer must be, from ``response_format`` or ``structured_outputs``, as a grammar for
workers (``Sampling.grammar``). Pure.

    {"type": "json_object"}                                    any JSON object
    {"type": "json_schema", "json_schema": {"schema": ...}}    JSON that is valid under a schema
    {"json": ...} {"regex": ...} {"choice": [...]} {"grammar": ...}   vLLM's names; the last in Lark

Between JSON's tokens an answer may have a blank, or a line end and an indentation: models
that find nothing to say would otherwise write blanks for ever.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
from llguidance import LLMatcher, grammar_from

from pagemesh.gateway.api.api_errors import ApiError, bad, missing
from pagemesh.gateway.api.grammar_check import fault_of
from pagemesh.gateway.api.openai_types import Common, StructuredOutputs
from pagemesh.gateway.api.schemas import followed_schema, in_one_line
from pagemesh.wire.errors import first_line
from pagemesh.wire.work_messages import GRAMMAR_CHARACTERS_MAX

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_BLANKS = r"( |\n[ \t]{0,20})?"
_CODE = "invalid_grammar"
_FORMAT, _OUTPUTS = "response_format", "structured_outputs"


def grammar_of(form: Common) -> str:
    """The grammar that ``form`` asks for; empty: none. Raises ``ApiError``, but for grammars that
    are wrong only ``check_grammar`` does."""
    asked = form.structured_outputs
    format_text = _of_format(form.response_format)
    if asked is None:
        return format_text
    if format_text:
        raise bad(_OUTPUTS, "give either response_format or structured_outputs")
    return _of_outputs(asked)


def param_of(form: Common) -> str:
    """The parameter that ``grammar_of`` read."""
    return _FORMAT if form.structured_outputs is None else _OUTPUTS


def check_grammar(text: str, param: str) -> None:
    """Raises ``ApiError`` for a grammar that is wrong or that nothing can satisfy, as far as one
    can tell without the vocabulary. May take a second."""
    if why := fault_of(text):
        raise bad(param, f"{param}: {in_one_line(why)}", code=_CODE)


def _of_format(value: dict[str, Any] | None) -> str:
    if value is None:
        return ""
    kind = value.get("type")
    match kind:
        case "text":
            return ""
        case "json_object":
            return _json_grammar({"type": "object"}, _FORMAT)
        case "json_schema":
            return _of_schema(value.get("json_schema"))
        case None:
            raise missing("response_format.type")
    raise bad(
        "response_format.type",
        f"response_format.type {str(kind)[:64]!r} is not one of text, json_object and json_schema",
    )


def _of_schema(asked: Any) -> str:
    where = "response_format.json_schema"
    if not isinstance(asked, dict):
        raise missing(where) if asked is None else bad(where, f"{where} must be an object")
    schema = asked.get("schema")
    if schema is None:
        raise missing(f"{where}.schema")
    if not isinstance(schema, dict):
        raise bad(f"{where}.schema", f"{where}.schema must be an object")
    return _json_grammar(schema, _FORMAT, strict=asked.get("strict") is True)


def _json_grammar(schema: dict[str, Any], param: str, *, strict: bool = False) -> str:
    """Unless ``strict``, what is unknown in a schema is ignored."""
    options: JsonCompileOptions = {
        "whitespace_flexible": True, "whitespace_pattern": _BLANKS, "lenient": not strict,
    }  # fmt: skip
    asked = followed_schema(schema, strict=strict)
    try:
        return _bounded(LLMatcher.grammar_from_json_schema(asked, overrides=options), param)
    except (ValueError, RecursionError) as error:
        raise bad(param, f"the schema is not valid: {first_line(error)}") from None


def _of_outputs(asked: StructuredOutputs) -> str:
    given = [name for name in asked.__struct_fields__ if getattr(asked, name) is not None]
    if len(given) != 1:
        raise bad(_OUTPUTS, "structured_outputs takes one of json, regex, choice and grammar")
    if asked.regex is not None:
        return _bounded(grammar_from("regex", asked.regex), _OUTPUTS)
    if asked.choice is not None:
        if not all(asked.choice):
            raise bad("structured_outputs.choice", "structured_outputs.choice: one is empty")
        options = " | ".join(json.dumps(option, ensure_ascii=False) for option in asked.choice)
        return _bounded(_lark(f"start: {options}"), _OUTPUTS)
    if asked.grammar is not None:
        return _bounded(_lark(asked.grammar), _OUTPUTS)
    return _json_grammar(_schema_in(asked.json), _OUTPUTS)


def _lark(text: str) -> str:
    return msgspec.json.encode({"grammars": [{"lark_grammar": text}]}).decode()


def _schema_in(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        where = "structured_outputs.json"
        raise bad(where, f"{where} must be a JSON schema, an object")
    return value


def _bounded(text: str, param: str) -> str:
    if len(text) > GRAMMAR_CHARACTERS_MAX:
        message = f"the grammar has {len(text)} characters; the limit is {GRAMMAR_CHARACTERS_MAX}"
        raise ApiError(400, message, param, _CODE)
    return text
