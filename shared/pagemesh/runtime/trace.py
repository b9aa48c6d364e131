"""Trace context: which span a hop is, and how the next hop learns of it.

A hop makes its own ``TraceContext`` at once (16 random bytes), passes it on in a
``traceparent`` header (W3C), and has the span built later, from recorded times, by
``spans.record_span``: off the hot path, and only for sampled traces.

Incoming headers are not trusted: one that is malformed or too long starts a new trace.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

TRACEPARENT = "traceparent"
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACEPARENT_CHARACTERS_MAX = 128
_SAMPLED = 0x01


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span, recorded or not. ``parent_id`` is 0 for the root of a trace."""

    trace_id: int
    span_id: int
    parent_id: int
    sampled: bool

    @property
    def traceparent(self) -> str:
        flags = "01" if self.sampled else "00"
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{flags}"

    def child(self) -> TraceContext:
        """The context of a new span under this one."""
        return TraceContext(self.trace_id, _new_id(64), self.span_id, self.sampled)


_current: ContextVar[TraceContext | None] = ContextVar("pagemesh_trace", default=None)


def new_trace(*, ratio: float = 1.0) -> TraceContext:
    """The root span of a new trace, sampled with probability ``ratio``."""
    return TraceContext(_new_id(128), _new_id(64), 0, random.random() < ratio)


def accept(headers: Mapping[str, str], *, ratio: float = 1.0) -> TraceContext:
    """The context of this hop's own span: under the caller's, or the root of a new trace
    when there is no valid one. Never raises."""
    remote = parse(headers.get(TRACEPARENT, ""))
    return remote.child() if remote is not None else new_trace(ratio=ratio)


def parse(traceparent: str) -> TraceContext | None:
    """The caller's span; None when the text is not a W3C traceparent."""
    if not traceparent or len(traceparent) > _TRACEPARENT_CHARACTERS_MAX:
        return None
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    # Later versions may append fields; version 00 has none and ff is forbidden.
    if version == "ff" or (version == "00" and rest):
        return None
    context = TraceContext(int(trace_id, 16), int(span_id, 16), 0, bool(int(flags, 16) & _SAMPLED))
    return context if context.trace_id and context.span_id else None


def current() -> TraceContext | None:
    """The span that the current task works for."""
    return _current.get()


@contextlib.contextmanager
def use(context: TraceContext) -> Iterator[TraceContext]:
    """Work for ``context``: logs carry its ids and calls pass it on."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


def inject(headers: Mapping[str, str] | None = None) -> dict[str, str]:
    """``headers`` with the current span's traceparent; unchanged if there is no span."""
    out = dict(headers) if headers else {}
    context = _current.get()
    if context is not None:
        out[TRACEPARENT] = context.traceparent
    return out


def _new_id(bits: int) -> int:
    # Unique, not secret: the system's randomness would cost a system call for each.
    return random.getrandbits(bits) or 1
