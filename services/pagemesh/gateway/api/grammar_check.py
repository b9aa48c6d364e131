"""What is wrong with a grammar, as far as one can tell without the vocabulary. Whatever clients
send, llguidance must neither end the process nor raise."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from pagemesh.runtime.deep_stack import on_deep_stack

_LOWEST = -(2.0**63)
"""llguidance counts in 64 bits. At a limit that is rounded to this one it recurses without end."""
_NUMBER = r"-[0-9]+(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?"
_NUMBERS = re.compile(f"({_NUMBER})")
_NUMBERS_OF_JSON = re.compile(rf'"(?:[^"\\]|\\.)*"|({_NUMBER})')
"""Those within texts are none."""
_KNOWN_MAX = 64
"""Grammars that are remembered: clients send the same schemas and tools again and again."""
_TOO_LOW = "numbers of -2^63 and below cannot be followed"


def fault_of(text: str) -> str:
    """Empty if nothing is wrong. May take a second."""
    for one in json.loads(text)["grammars"]:
        lark = one.get("lark_grammar")
        why = fault_of_numbers(one["json_schema"]) if lark is None else _too_low(_NUMBERS, lark)
        if why:
            return why
    return fault_of_checked(text)


def fault_of_numbers(schema: Mapping[str, Any]) -> str:
    """Of a JSON schema, as in ``fault_of``."""
    return _too_low(_NUMBERS_OF_JSON, json.dumps(schema))


@lru_cache(_KNOWN_MAX)
def fault_of_checked(text: str) -> str:
    """``fault_of`` a grammar whose schemas ``fault_of_numbers`` has seen. Takes 100 ms for 100
    functions."""
    try:
        wrong, messages = on_deep_stack(lambda: LLMatcher.validate_grammar_with_warnings(text))
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust, which no door would catch and answer
        return f"it cannot be read: {type(error).__name__}"
    return (messages[0] if messages else "it is not valid") if wrong else ""


def _too_low(numbers: re.Pattern[str], text: str) -> str:
    found = (match.group(1) for match in numbers.finditer(text))
    return _TOO_LOW if any(number and float(number) <= _LOWEST for number in found) else ""
