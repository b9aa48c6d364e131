"""A prefix to pin: given as text, as chat messages, or as root and token ids.

Text is tokenised by the gateway alone (``/tokenize``), which also names the roots under which the
mesh caches the prompts of this API key.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx
import msgspec

from pagemesh.cli.answers import Tokenized
from pagemesh.cli.chat_stream import answer_of, client, place, tls_failure
from pagemesh.cli.client_config import ClientConfig
from pagemesh.cli.words import typed
from pagemesh.runtime.ports import shown_urls
from pagemesh.wire.cache_messages import RootName
from pagemesh.wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Prefix:
    """The prefix as given on the command line."""

    text: str | None
    messages: Path | None
    salt: str
    root: str | None
    tokens: tuple[int, ...] | None


def prefixes(prefix: Prefix, config: ClientConfig) -> list[tuple[str, list[int]]]:
    """Pairs of root (hexadecimal) and token ids; several when workers serve different models.
    Raises ``ConfigError`` or a usage error for an invalid prefix, and ``ChatError`` for one that
    the gateway refuses."""
    given = [name for name in ("text", "messages", "tokens") if getattr(prefix, name) is not None]
    if len(given) != 1 or (prefix.root is None) != (given != ["tokens"]):
        raise click.UsageError("give one of --text, --messages, and --root with --tokens")
    if prefix.text == "":
        raise ConfigError("--text has nothing to pin; name the text that prompts begin with")
    if prefix.root is not None and prefix.tokens is not None:
        return [(_root(prefix.root), list(prefix.tokens))]
    body: dict[str, Any] = {"cache_salt": typed(prefix.salt) or None}
    if prefix.messages is not None:
        body |= {"messages": _messages(prefix.messages), "add_generation_prompt": False}
    else:
        body["prompt"] = None if prefix.text is None else typed(prefix.text)
    found = _tokenized(config, body)
    if not found.cache_roots:
        shown = shown_urls(config.url)
        raise ConfigError(f"no worker serves a model at {shown} yet; wait until it is ready")
    return [(root, found.tokens) for root in found.cache_roots]


def _tokenized(config: ClientConfig, body: dict[str, Any]) -> Tokenized:
    with client(config) as http:
        try:
            answer = http.post("/tokenize", json=body)
        except httpx.HTTPError as error:
            raise tls_failure(http, error) or ConfigError(
                f"no gateway at {place(http)} ({type(error).__name__}); start one with "
                "`pagemesh up`, or name another with --url or its pool folder with --pool-dir"
            ) from None
        return answer_of(answer, Tokenized)


def _root(text: str) -> str:
    try:
        return msgspec.convert(text.lower(), RootName)
    except msgspec.ValidationError:
        raise click.UsageError(f"--root {text[:80]!r} is not 64 hexadecimal digits") from None


def _messages(path: Path) -> list[Any]:
    try:
        found = json.loads(path.read_bytes())
        json.dumps(found, ensure_ascii=False).encode()  # fails for a lone surrogate
    except OSError as error:
        raise ConfigError(f"--messages {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"--messages {path} is not JSON") from None
    if not isinstance(found, list) or not found:
        raise ConfigError(f"--messages {path} is not a list of at least one message")
    return found
