"""``pagemesh chat``: talk to a running mesh; shows what was cached and when tokens came."""

from __future__ import annotations

import contextlib
import shutil
import sys
from typing import Any

import click
import httpx
from rich.console import Console

from pagemesh.cli.chat_stream import (
    Answer,
    ChatError,
    Message,
    NoRoom,
    ask,
    client,
    place,
    served_model,
)
from pagemesh.cli.gateway_url import client_config, gateway_flags, pool_dir_flag
from pagemesh.cli.options import check_variables
from pagemesh.cli.param_types import Number, Whole
from pagemesh.cli.word_wrap import WordWrap
from pagemesh.cli.words import typed
from pagemesh.wire.errors import ConfigError

_HELP = "Type a message; /reset forgets the conversation, /quit or Ctrl-D leaves."
_MESSAGE_COUNT_MAX = 200


@click.command()
@click.option("--once", metavar="TEXT", help="Ask TEXT, print the answer and exit.")
@click.option("--system", metavar="TEXT", help="System message that starts the conversation.")
@click.option("--max-tokens", type=Whole(1), default=512, show_default=True,
              help="Maximum tokens per answer, within what the context has left.")  # fmt: skip
@click.option("--temperature", type=Number(0, 2), default=None,
              help="Sampling temperature; 0 is greedy.  [default: the model's, or 1]")  # fmt: skip
@click.option("--seed", type=int, default=None, help="Random seed, for repeatable answers.")
@gateway_flags
@pool_dir_flag
def chat(
    once: str | None,
    system: str | None,
    max_tokens: int,
    temperature: float | None,
    seed: int | None,
    **arguments: Any,
) -> int:
    """Chat with the model that a running mesh serves.

    If the mesh requires an API key, set PAGEMESH_API_KEY.
    """
    check_variables()
    if once is not None and not once.strip():
        raise ConfigError("--once is empty; give the text to ask")
    if sys.stdout is None:
        raise ConfigError("there is no standard output for answers; it was closed")
    config = client_config(arguments)
    settings: dict[str, Any] = {"max_tokens": max_tokens}
    if temperature is not None:
        settings["temperature"] = temperature
    if seed is not None:
        settings["seed"] = seed
    first: list[Message] = [{"role": "system", "content": typed(system)}] if system else []
    with client(config) as http:
        settings["model"] = served_model(http)
        if once is not None:
            _say(http, settings, [*first, {"role": "user", "content": typed(once)}])
            return 0
        if sys.stdin is None:
            raise ConfigError("there is no standard input for messages; use --once TEXT")
        _converse(http, settings, first)
    return 0


def _converse(http: httpx.Client, settings: dict[str, Any], first: list[Message]) -> None:
    notes = _notes()
    notes.print(f"{settings['model']} at {place(http)}. {_HELP}", style="dim", soft_wrap=True)
    messages = list(first)
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    if prompt:
        with contextlib.suppress(ImportError):  # not every Python has it
            import readline  # noqa: F401  (gives ``input`` line editing and history)
    while True:
        try:
            text = typed(input(prompt)).strip()
        except (EOFError, KeyboardInterrupt):
            notes.print()
            return
        if text == "/quit":
            return
        if text == "/reset":
            messages = list(first)
            notes.print("a new conversation", style="dim")
            continue
        if text.startswith("/") and " " not in text:
            notes.print(_HELP, style="dim", soft_wrap=True)
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        try:
            answer = _say(http, settings, messages)
        except ChatError as error:
            hint = "; /reset starts a new conversation" if isinstance(error, NoRoom) else ""
            notes.print(f"error: {error}{hint}", style="red", soft_wrap=True)
            messages.pop()
            continue
        except KeyboardInterrupt:  # leaving the stream cancels the request
            notes.print(" (stopped)", style="dim")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer.text})
        if len(messages) > _MESSAGE_COUNT_MAX:
            hint = "the conversation is very long; /reset starts a new one"
            notes.print(hint, style="yellow", soft_wrap=True)


def _say(http: httpx.Client, settings: dict[str, Any], messages: list[Message]) -> Answer:
    """Stream the answer to stdout (wrapped at words on a terminal, otherwise verbatim), then print
    its token counts and times to stderr."""
    on_terminal = sys.stdout.isatty()
    wrap = WordWrap(shutil.get_terminal_size().columns)

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def show(piece: str) -> None:
        write(wrap.feed(piece) if on_terminal else piece)

    answer = ask(http, {**settings, "messages": messages}, show)
    write(wrap.end() + "\n")
    _notes().print(answer.facts, style="dim", soft_wrap=True)
    return answer


def _notes() -> Console:
    """The console for everything but answers. Names and errors are printed without markup."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)
