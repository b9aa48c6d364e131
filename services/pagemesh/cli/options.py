"""Command line flags, generated from the configuration dataclasses: ``PAGEMESH_HTTP_PORT`` and
``--http-port`` are one setting. Values remain text here; ``runtime.config.load`` validates them.

Secrets have no flag, since every user of a machine can read its command lines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import click

from pagemesh.cli.client_config import ClientConfig
from pagemesh.cli.mesh.up_config import UpConfig
from pagemesh.runtime import compiled
from pagemesh.runtime.config import Option, Secret, options, unknown_variables
from pagemesh.runtime.settings import CONFIGS
from pagemesh.wire.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


class ConfigFlag(click.Option):
    """A flag made from a setting; ``section`` is the heading that ``--help`` shows it under."""

    def __init__(self, *names: Any, section: str, **rest: Any) -> None:
        super().__init__(*names, **rest)
        self.section = section


class Sectioned(click.Command):
    """A command with so many flags that its help needs headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                title = param.section if isinstance(param, ConfigFlag) else "Options"
                sections.setdefault(title, []).append(record)
        secrets = [
            (option.variable, option.help)
            for kind in CONFIGS
            if _title(kind) in sections
            for option in options(kind)
            if option.kind is Secret
        ]
        if secrets:
            sections["Secrets, which are variables only"] = secrets
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def config_flags(
    *kinds: type[object],
    defaults: Mapping[str, str] | None = None,
    without: Collection[str] = (),
) -> Callable[[F], F]:
    """One flag for each setting of ``kinds``, except secrets. The command gets them as keyword
    arguments named after the variables; ``given_flags`` picks those that the user gave.

    ``defaults``: by variable, the default to show in the help if this command's own differs.
    ``without``: variables that get no flag.
    """
    found = [
        (replace(option, default=(defaults or {}).get(option.variable, option.default)), kind)
        for kind in kinds
        for option in options(kind)
        if option.kind is not Secret and option.variable not in without
    ]

    def decorate(command: F) -> F:
        for option, kind in reversed(found):
            command = _flag(option, _title(kind))(command)
        return command

    return decorate


def given_flags(arguments: Mapping[str, object]) -> dict[str, str]:
    """The flags that were given: variable name -> text."""
    flags: dict[str, str] = {}
    for name, value in arguments.items():
        if isinstance(value, bool):
            flags[name.upper()] = "true" if value else "false"
        elif value is not None:
            flags[name.upper()] = str(value)
    return flags


def check_variables() -> None:
    """Raises ``ConfigError`` for a ``PAGEMESH_*`` variable that nothing reads: most likely it is a
    typo, which would silently leave the intended setting at its default."""
    settable = {name: text for name, text in os.environ.items() if name != compiled.VARIABLE}
    unknown = unknown_variables(settable, (*CONFIGS, UpConfig, ClientConfig))
    if unknown:
        raise ConfigError(f"{unknown[0]} is not a setting of pagemesh; correct or unset it")


def _title(kind: type[object]) -> str:
    """The heading of a configuration's flags."""
    return (kind.__doc__ or "Options").strip(".\n ")


def _flag(option: Option, section: str) -> Callable[[F], F]:
    name = option.variable.lower()
    note = f"{option.help}  [{option.variable}]"
    if option.kind is bool:
        both = f"{option.flag}/--no-{option.flag[2:]}"
        return click.option(both, name, cls=ConfigFlag, section=section, default=None, help=note)
    if option.default:
        note += f"  [default: {option.default}]"
    metavar = "|".join(filter(None, option.choices)) or _METAVARS.get(option.kind, "TEXT")
    metavar = "SIZE" if option.size else metavar
    return click.option(
        option.flag, name, cls=ConfigFlag, section=section, default=None, metavar=metavar, help=note
    )


_METAVARS: dict[object, str] = {int: "N", float: "X"}
