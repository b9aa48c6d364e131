"""Logging: structlog, JSON lines on stderr with trace ids, a console on a terminal.

The text of exceptions is left out unless asked for: it may quote prompts, paths or peers.
What is logged of an error is its type and where it was raised. Fields never become part of
the message, so nothing a peer sends can forge a line.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, TextIO, cast

import structlog

import pagemesh
from pagemesh.runtime import trace
from pagemesh.runtime.settings import TelemetryConfig
from pagemesh.runtime.unheard import Unheard
from pagemesh.wire.errors import PagemeshError

Event = MutableMapping[str, Any]
_TEXT_CHARACTERS_MAX = 2_000
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def get_logger(name: str) -> Any:
    """A logger; events are dotted names (``bus.lost``), facts are keyword arguments."""
    return structlog.get_logger(module=name)


def set_up_logs(
    config: TelemetryConfig, *, service: str, name: str = "", stream: TextIO | None = None
) -> None:
    """Configure logging of this process, to stderr unless there is a ``stream``; call it once,
    before anything logs. A stream that cannot be written to stops nothing."""
    out = cast(TextIO, Unheard(stream))
    console = config.log_format == "console" or (config.log_format == "auto" and out.isatty())
    renderer: Any = structlog.processors.JSONRenderer()
    if console:
        colors = out.isatty() and not os.environ.get("NO_COLOR")
        renderer = structlog.dev.ConsoleRenderer(colors=colors)
    facts = {"service": service} | ({"name": name} if name else {})
    _configure(config, facts, renderer, out)
    # Libraries log through the standard module; only their errors are wanted.
    logging.basicConfig(level=logging.ERROR, stream=out, format="%(message)s", force=True)
    quiet_libraries()


def quiet_libraries() -> None:
    """Keep from people what libraries log of errors that we report ourselves."""
    for name in ("nats", "opentelemetry", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _configure(config: TelemetryConfig, facts: dict[str, str], renderer: Any, out: TextIO) -> None:
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _add_facts(facts),
            _add_trace,
            _describe_errors(with_text=config.log_exception_text),
            _bound_text,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[config.log_level]),
        logger_factory=lambda *_: structlog.PrintLogger(out),
        cache_logger_on_first_use=False,
    )


def _add_facts(facts: dict[str, str]) -> Callable[[Any, str, Event], Event]:
    def add(_logger: Any, _method: str, event: Event) -> Event:
        for key, value in facts.items():
            event.setdefault(key, value)
        return event

    return add


def _add_trace(_logger: Any, _method: str, event: Event) -> Event:
    context = trace.current()
    if context is not None:
        event["trace_id"] = f"{context.trace_id:032x}"
        event["span_id"] = f"{context.span_id:016x}"
    return event


def _describe_errors(*, with_text: bool) -> Callable[[Any, str, Event], Event]:
    def describe(_logger: Any, _method: str, event: Event) -> Event:
        event.pop("exc_info", None)
        for key, value in tuple(event.items()):
            if isinstance(value, BaseException):
                event[key] = error_facts(value, with_text=with_text)
        return event

    return describe


def error_facts(error: BaseException, *, with_text: bool = False) -> dict[str, str]:
    """Type and place of an error; its text only for our own faults or when asked for."""
    facts = {"type": type(error).__name__}
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        facts["at"] = f"{_place(Path(frames[-1].filename))}:{frames[-1].lineno}"
    if with_text or isinstance(error, PagemeshError):
        facts["text"] = str(error)
    return facts


def _place(path: Path) -> str:
    """The path within our packages, otherwise the file's name alone: the folders of a machine or
    the name of a checkout say nothing about the error."""
    for root in pagemesh.__path__:
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return path.name


def _bound_text(_logger: Any, _method: str, event: Event) -> Event:
    for key, value in event.items():
        if isinstance(value, str) and len(value) > _TEXT_CHARACTERS_MAX:
            event[key] = value[:_TEXT_CHARACTERS_MAX] + "..."
    return event


# Until a process sets up its logs, warnings go to stderr, never to stdout.
_configure(
    TelemetryConfig(log_level="warning"),
    {},
    structlog.processors.JSONRenderer(),
    cast(TextIO, Unheard()),
)
