"""Where a model's folder has its chat templates: alone, or several by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagemesh.runtime.model_folder import read_config
from pagemesh.wire.errors import ConfigError

_FOR_TOOLS = "tool_use"
"""What ``transformers`` calls the template for chats with tools."""


def template_sources(folder: Path, config: Mapping[str, Any]) -> tuple[str, str]:
    """The default template's text, and that for chats with tools if it is another; empty: there is
    none. ``config``: that of the tokenizer. Raises ``ConfigError``."""
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        other = folder / "additional_chat_templates" / f"{_FOR_TOOLS}.jinja"
        return _read(alone), _read(other) if other.is_file() else ""
    path = folder / "chat_template.json"
    beside = read_config(path) if path.is_file() else {}
    source = config.get("chat_template") or beside.get("chat_template")
    if isinstance(source, list):
        return _named(source, "default"), _named(source, _FOR_TOOLS)
    return source if isinstance(source, str) else "", ""


def _named(templates: list[Any], name: str) -> str:
    found = [one for one in templates if isinstance(one, dict) and one.get("name") == name]
    source = found[-1].get("template") if found else None
    return source if isinstance(source, str) else ""


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
