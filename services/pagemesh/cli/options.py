"""Command line flags, made from the configuration dataclasses: ``PAGEMESH_HTTP_PORT`` and
``--http-port`` are one setting. Values stay text here; ``runtime.config.load`` judges them.

Secrets have no flag, since every user of a machine can read a command line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from pagemesh.cli.client_config import ClientConfig
from pagemesh.cli.up_config import UpConfig
from pagemesh.runtime.config import Option, Secret, options, unknown_variables
from pagemesh.runtime.settings import CONFIGS
from pagemesh.wire.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def config_flags(*kinds: type[object]) -> Callable[[F], F]:
    """One flag for each setting of ``kinds`` (but secrets). The command gets them as keyword
    arguments named by variable; ``given_flags`` picks out what the user gave."""
    found = [option for kind in kinds for option in options(kind) if option.kind is not Secret]

    def decorate(command: F) -> F:
        for option in reversed(found):
            command = _flag(option)(command)
        return command

    return decorate


def given_flags(arguments: Mapping[str, object]) -> dict[str, str]:
    """Variable name to text, for the flags that were given."""
    flags: dict[str, str] = {}
    for name, value in arguments.items():
        if isinstance(value, bool):
            flags[name.upper()] = "true" if value else "false"
        elif value is not None:
            flags[name.upper()] = str(value)
    return flags


def check_variables() -> None:
    """Raises ``ConfigError`` for a ``PAGEMESH_*`` variable that nothing reads: most likely a
    typing error, and then the setting the user meant is silently at its default."""
    unknown = unknown_variables(os.environ, (*CONFIGS, UpConfig, ClientConfig))
    if unknown:
        raise ConfigError(f"{unknown[0]} is no setting of pagemesh; correct or unset it")


def _flag(option: Option) -> Callable[[F], F]:
    name = option.variable.lower()
    note = f"{option.help}  [{option.variable}]"
    if option.kind is bool:
        return click.option(f"{option.flag}/--no-{option.flag[2:]}", name, default=None, help=note)
    if option.default:
        note += f"  [default: {option.default}]"
    metavar = "|".join(option.choices) or _METAVARS.get(option.kind, "TEXT")
    return click.option(option.flag, name, default=None, metavar=metavar, help=note)


_METAVARS: dict[object, str] = {int: "N", float: "X"}
