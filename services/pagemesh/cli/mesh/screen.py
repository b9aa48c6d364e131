"""What ``pagemesh up`` shows on stderr: one line per service while loading, then events.

A capable terminal gets these lines redrawn in place; otherwise each change is a line of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Self, cast

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from pagemesh.runtime.unheard import Unheard

_STYLES = {"ready": "green", "starting": "yellow", "started": "yellow", "waiting": "dim"}
_WIDTH_NAME = 14


def fitted(head: str, facts: Sequence[str], *, width: int | None) -> str:
    """``head (fact; fact)`` in one line, or head and facts on a line each if a terminal of
    ``width`` columns would wrap it, perhaps within the URL that people copy."""
    line = f"{head} ({'; '.join(facts)})"
    if width is None or len(line) <= width:
        return line
    return "\n  ".join((head, *facts))


def announce(text: str) -> None:
    """Print a line to stdout, if that is still open."""
    if sys.stdout is not None:
        Unheard(sys.stdout).write(text + "\n")


class Screen:
    """Use as a context manager; ``settle`` ends the loading display."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or _stderr()
        self._states: dict[str, str] = {}
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                console=self._console, transient=True, refresh_per_second=8,
                get_renderable=self._render,
            )  # fmt: skip
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.settle()

    def expect(self, name: str) -> None:
        """Show ``name`` from now on."""
        self._states.setdefault(name, "waiting")

    def change(self, name: str, state: str) -> None:
        """``name`` is in another state."""
        if self.shows(name, state):
            return
        self._states[name] = state
        if self._live is None:
            self.line(f"{name}: {state}")

    def shows(self, name: str, state: str) -> bool:
        """Whether ``state`` is the last state of ``name``, as reported by itself or by its
        ``Child``."""
        return self._states.get(name) == state

    def line(self, text: str) -> None:
        """Print a line; the services' logs are passed on this way, unchanged."""
        self._console.print(text, markup=False, emoji=False, soft_wrap=True)

    def settle(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self) -> Group:
        return Group(*(self._row(name, state) for name, state in self._states.items()))

    @staticmethod
    def _row(name: str, state: str) -> Spinner | Text:
        style = _STYLES.get(state, "red")
        text = Text(f"{name:<{_WIDTH_NAME}} {state}", style)
        return Text("✓ ", "green") + text if state == "ready" else Spinner("dots", text)


def _stderr() -> Console:
    if sys.stderr is None:  # it was closed before we started
        return Console(quiet=True)
    return Console(file=cast("IO[str]", Unheard(sys.stderr)), highlight=False)
