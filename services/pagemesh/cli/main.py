"""The ``pagemesh`` command. A user's mistake is reported in one line, with exit code 2."""

from __future__ import annotations

import errno
import importlib
import io
import sys
from typing import ClassVar

import click

from pagemesh.cli.interrupts import EndAtOnce
from pagemesh.cli.other_names import name_here
from pagemesh.runtime.version import __version__

ERROR_PREFIX = "error: "
EXIT_CONFIG = 2
EXIT_STOPPED = 130
WRITE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


class _Lazy(click.Group):
    """Commands are imported when they run: ``--version`` and ``--help`` stay instant."""

    _HELP: ClassVar[dict[str, str]] = {
        "up": "Start the whole mesh on this machine and print its URL.",
        "serve": "Run one service: gateway, pager, prefill or decode.",
        "chat": "Chat with the model that a running mesh serves.",
        "bench": "Measure how fast a running mesh answers.",
        "plan": "Show how much KV memory a model needs and what fits.",
        "replay": "Replay a trace of requests and show the prefix cache's hit rates.",
        "cache": "Inspect a mesh's cache, pin prefixes, invalidate prefixes.",
        "audit": "Check that pagers and workers agree on leases and pages.",
        "doctor": "Check whether this machine can run a mesh.",
        "health": "Exit 0 if a URL answers; for container health checks.",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._HELP)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._HELP:
            return None
        with EndAtOnce():
            module = importlib.import_module(f"pagemesh.cli.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self._HELP.items()))


@click.group(
    cls=_Lazy, context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="pagemesh")
def cli() -> None:
    """LLM serving as a mesh of small services over NATS."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit with its code."""
    for stream in (sys.stdin, sys.stdout):  # any locale: keep odd input bytes, print some letter
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="surrogateescape" if stream is sys.stdin else "replace")
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line ``arguments`` (None: this process's own) and return its exit code."""
    try:  # imports numpy, which takes long enough for a Ctrl-C
        from pagemesh.wire.errors import ConfigError, PagemeshError
    except KeyboardInterrupt:
        return EXIT_STOPPED
    try:
        code = cli.main(arguments, prog_name="pagemesh", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        return EXIT_CONFIG
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else _command_path(arguments)
        return _fail(f"{_said(error, command)}; see {command} --help", EXIT_CONFIG)
    except click.Abort:
        return EXIT_STOPPED
    except ConfigError as error:
        return _fail(str(error), EXIT_CONFIG)
    except PagemeshError as error:
        return _fail(str(error), 1)
    except OSError as error:
        if error.errno not in WRITE_ERRORS:
            raise
        what = error.filename or "the output"
        return _fail(f"{what} could not be written: {error.strerror}", 1)
    return code if isinstance(code, int) else 0


def _said(error: click.UsageError, command: str) -> str:
    """Click's message; for a flag that another server has, the name it has here, instead of the
    similar flags that click would suggest."""
    if isinstance(error, click.NoSuchOption):
        here = name_here(command, error.option_name)
        if here is not None:
            return f"{error.message.rstrip('.')}, which is here {here}"
    return error.format_message().rstrip(".")


def _command_path(arguments: list[str] | None) -> str:
    """The command that was meant. Click's error for an option without its argument carries no
    context that would tell."""
    command: click.Command | None = cli
    path = "pagemesh"
    for word in sys.argv[1:] if arguments is None else arguments:
        if isinstance(command, click.Group):
            command = command.get_command(click.Context(command), word)
            path += f" {word}" if command is not None else ""
    return path


def _fail(text: str, code: int) -> int:
    line = " ".join(text.split())
    click.echo(f"{ERROR_PREFIX}{line}", err=True)
    return code
