"""Every way a request can fail, and what the caller can do next.

PagemeshError
|-- ConfigError         a bad flag, variable or file: start-up stops, exit code 2
|-- Fault               a typed refusal that travels (``Refused`` on the wire)
    |-- Busy            a queue is full: try again after ``retry_after_ms``
    |   |-- NotReady      no suitable worker is ready (yet): the same
    |   |   |-- NotServed   workers of other models only are ready: the same, or look at --model
    |   |-- Disconnected  the bus is down; whether the peer got the request is unknown: ask again
    |-- NoCapacity      the request can never fit, or not now: shrink it or wait
    |   |-- OverQuota     its tenant may not use so many pages: the same, or ask for a larger quota
    |-- Stale           the handle, lease or epoch belongs to another life: admit again
    |   |-- Superseded    the weights it began with are no longer served: start over
    |   |-- TicketOver    the ticket's lease has ended, nobody can redeem it: start over
    |-- GrammarRefused  the answer cannot follow its grammar: change the grammar
    |-- Malformed       the message is not what the subject takes: fix the caller
    |-- Gone            the thing named does not exist (any more): forget it
    |   |-- Absent        nobody listens on the subject: the service is not there
    |-- DeadlineExceeded  no time is left: give up
    |-- Denied          the caller may not do this: change who asks
    |-- Internal        a bug was caught at a boundary: report it
"""

from __future__ import annotations

from typing import ClassVar

_OTHERS_CHARS_MAX = 300
_NAME_CHARS_MAX = 80


class PagemeshError(Exception):
    """Root of every error raised on purpose."""


class ConfigError(PagemeshError):
    """A setting is wrong; the message names it and says what to do."""


class Fault(PagemeshError):
    """A typed refusal. ``code`` is the class name and what travels on the wire.

    ``retry_after_ms`` is 0 when trying again is pointless or may be immediate.
    """

    codes: ClassVar[dict[str, type[Fault]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Fault.codes[cls.__name__] = cls

    def __init__(self, message: str, *, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms

    @property
    def code(self) -> str:
        return type(self).__name__


class Busy(Fault):
    """A bounded queue is full."""


class NotReady(Busy):
    """No suitable worker is ready, yet or any more."""


class NotServed(NotReady):
    """Workers are ready, but all of them serve other models."""


class Disconnected(Busy):
    """The connection to the bus is lost. The request may or may not have been carried out."""


class NoCapacity(Fault):
    """There are not enough pages, now or ever (the message says which)."""


class OverQuota(NoCapacity):
    """More pages than the tenant may use, now or ever (the message gives the numbers)."""


class Stale(Fault):
    """The handle, lease, ticket or session belongs to another life."""


class Superseded(Stale):
    """The weights that the request began with have been replaced under the same model name."""


class TicketOver(Stale):
    """The ticket has ended, and its lease with it."""


class GrammarRefused(Fault):
    """No answer can follow the grammar that was asked for, or not this one any further (the message
    says why)."""


class Malformed(Fault):
    """The bytes are not a message of the type the subject takes."""


class Gone(Fault):
    """The thing named does not exist (any more)."""


class Absent(Gone):
    """No service listens on the subject. Says nothing about what the service would answer."""


class DeadlineExceeded(Fault):
    """The remaining time does not suffice."""


class Denied(Fault):
    """The caller has no right to this."""


class Internal(Fault):
    """A bug, caught at a boundary so that the peer is not left in silence."""


def fault(code: str, message: str, *, retry_after_ms: int = 0) -> Fault:
    """The fault that a wire code names; an unknown code becomes ``Internal``."""
    return Fault.codes.get(code, Internal)(message, retry_after_ms=retry_after_ms)


def first_line(error: Exception) -> str:
    """The text of a third-party error for one line of ours: its first line, joined with the second
    if the first ends in a colon, cut to length; the name of its type if it has no text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]) or type(error).__name__
    return said[:_OTHERS_CHARS_MAX]


def shown_name(name: object) -> str:
    """A name out of a file for one line of ours: as it is if it is short and harmless to a
    terminal, else quoted and cut to length."""
    text = str(name)
    is_plain = text.isascii() and text.isprintable() and 0 < len(text) <= _NAME_CHARS_MAX
    return text if is_plain else repr(text[:_NAME_CHARS_MAX])
