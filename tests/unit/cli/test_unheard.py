"""What a command writes may reach nobody: terminals are closed, disks fill up."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import sys
import termios
import threading
import time
from typing import IO, cast

import click
import pytest
from rich.console import Console
from tests.support.full_disk import Full
from tests.unit.cli.test_command_line import error_of

from pagemesh.cli import up
from pagemesh.cli.main import cli, run
from pagemesh.cli.mesh.screen import Screen, announce
from pagemesh.runtime.service_config import load_service_config
from pagemesh.runtime.unheard import Unheard


def test_a_mesh_goes_on_when_nobody_can_read_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Full())
    monkeypatch.setattr(sys, "stdout", Full())
    screen = Screen()
    with screen:
        screen.change("pager", "ready")
        screen.line("stopping")
    announce("ready http://127.0.0.1:8000")


def test_a_paused_terminal_holds_up_no_ready_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, os.fdopen(ours, "rb", buffering=0) as keyboard:
        monkeypatch.setattr(sys, "stdout", terminal)
        termios.tcflow(theirs, termios.TCOOFF)  # as Ctrl-S does
        announcing = threading.Thread(target=announce, args=["ready"], daemon=True)
        announcing.start()
        announcing.join(5.0)
        was_held_up = announcing.is_alive()
        termios.tcflow(theirs, termios.TCOON)
        announcing.join(5.0)
        assert not was_held_up
        announce("read")
        assert keyboard.read(100) == b"read\r\n"


def test_a_mesh_whose_streams_were_closed_before_it_began_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_service_config({})
    with monkeypatch.context() as closed:
        closed.setattr(sys, "stdout", None)
        assert up._width() is None
        announce("ready http://127.0.0.1:8000")
        assert run(["chat", "--once", "hello"]) == 2
        assert "there is no standard output" in capsys.readouterr().err
        closed.setattr(sys, "stderr", None)
        assert up.for_eyes(config) is config
        with Screen() as screen:
            screen.line("stopping")
    assert capsys.readouterr() == ("", "")


def test_what_can_be_read_is_written_as_it_is() -> None:
    kept = io.StringIO()
    stream = Unheard(kept)
    assert stream.write("line") == 4 and kept.getvalue() == "line"
    assert not stream.isatty()


def test_what_services_log_is_shown_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().line("model [bold]tiny[/x]:smile: is here")
    assert capsys.readouterr().err == "model [bold]tiny[/x]:smile: is here\n"


def test_a_terminal_where_nothing_can_be_redrawn_is_told_each_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "dumb")  # as in the shell of an editor
    shown = io.StringIO()
    with Screen(Console(file=shown, force_terminal=True)) as screen:
        screen.expect("pager")
        screen.change("pager", "ready")
    assert shown.getvalue() == "pager: ready\n"


def test_a_closed_terminal_stops_no_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    terminal = os.fdopen(theirs, "w")
    monkeypatch.setattr(sys, "stderr", terminal)
    with Screen() as screen:
        screen.expect("pager")
        os.close(ours)
        screen.line("stopping")
    with contextlib.suppress(OSError):  # what it could not write it tries again
        terminal.close()


def test_a_command_whose_output_cannot_be_written_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = cli.get_command(click.Context(cli), "plan")
    assert command is not None
    monkeypatch.setattr(command, "callback", lambda **_: Full().write(""))
    assert run(["plan"]) == 1
    assert (
        capsys.readouterr().err
        == "error: the output could not be written: No space left on device\n"
    )


def test_a_key_or_a_url_that_is_none_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "'http://[::1' (--url) is not" in error_of(capsys, "chat", "--url", "http://[::1")
    monkeypatch.setenv("PAGEMESH_API_KEY", "schl\u00fcssel")
    line = error_of(capsys, "chat", "--url", "http://127.0.0.1:1", "--once", "hello")
    assert line.startswith("error: PAGEMESH_API_KEY holds what no key has")


def test_a_reader_that_stands_still_holds_up_nobody_and_is_told_what_it_missed() -> None:
    ours, theirs = os.pipe()
    with os.fdopen(theirs, "w", buffering=1) as pipe, os.fdopen(ours, "rb", buffering=0) as reader:
        file = cast(IO[str], Unheard(pipe))
        screen = Screen(Console(file=file, highlight=False, width=400))

        def write() -> None:
            for _ in range(1_000):
                screen.line("x" * 300)

        writing = threading.Thread(target=write, daemon=True)
        writing.start()
        writing.join(20.0)
        assert not writing.is_alive()
        read = reader.read(1 << 20)
        screen.line("here again")
        read += reader.read(1 << 20)
    lines = read.decode().splitlines()
    missing = 1_000 - sum(line == "x" * 300 for line in lines)
    assert lines[-1] == "here again" and 0 < missing < 1_000
    assert any("lines are missing here" in line for line in lines)


def test_a_terminal_that_nobody_reads_holds_up_nobody_however_long_the_lines_are() -> None:
    for length in (60, 120, 700, 990, 2_500):
        ours, theirs = pty.openpty()  # as people have it: it makes two characters of each newline
        with os.fdopen(theirs, "w") as terminal, os.fdopen(ours, "rb", buffering=0) as keyboard:
            stream = Unheard(terminal)
            _write_lines(stream, "x" * length + "\n", 1_000)
            assert os.get_blocking(theirs), "others write there too"
            read = b""
            while select.select([keyboard], [], [], 0.1)[0]:
                read += keyboard.read(1 << 16)
            stream.write("here again\n")
            while not read.endswith(b"here again\r\n"):
                read += keyboard.read(1 << 16)
        lines = read.decode().splitlines()
        whole = sum(line == "x" * length for line in lines)
        told = next(line for line in lines if "lines are missing here" in line)
        assert 0 < whole < 1_000 and int(told.split()[1]) == 1_000 - whole


def test_a_terminal_that_is_read_slowly_misses_nothing() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, os.fdopen(ours, "rb", buffering=0) as keyboard:
        writing = threading.Thread(
            target=_write_lines, args=[Unheard(terminal), "x" * 990 + "\n", 100], daemon=True
        )
        writing.start()
        read = b""
        while read.count(b"\n") < 100:
            read += keyboard.read(1_000)
            time.sleep(0.001)
    assert read == (b"x" * 990 + b"\r\n") * 100


def _write_lines(stream: Unheard, line: str, count: int) -> None:
    def write() -> None:
        for _ in range(count):
            stream.write(line)

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    writing.join(20.0)
    assert not writing.is_alive(), "it waits for its reader"
