"""An open file goes from one process to another, or nothing does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pagemesh.runtime import descriptors
from pagemesh.runtime.descriptors import Packet, exchange, listen

GIVER = """
import os, sys, pathlib
from pagemesh.runtime import descriptors
made = os.memfd_create("test")
os.write(made, b"made elsewhere")
with descriptors.listen(pathlib.Path(sys.argv[1])) as listening:
    print("listening", flush=True)
    connection, _ = listening.accept()
    with connection:
        asked = descriptors.receive(connection)
        descriptors.send(connection, descriptors.Packet(asked.data + b"!", made))
"""


def answering(path: Path, answer: Callable[[socket.socket], None]) -> threading.Thread:
    """Answers one connection at ``path``."""
    listening = listen(path)

    def serve() -> None:
        with listening:
            connection, _ = listening.accept()
            with connection:
                answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_what_a_process_made_outlives_it_in_the_hands_of_another(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 40) / "socket"
    path.parent.mkdir()
    giver = subprocess.Popen(
        [sys.executable, "-c", GIVER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert giver.stdout is not None
    with giver.stdout:
        assert giver.stdout.readline() == "listening\n"
        assert path.stat().st_mode & 0o777 == 0o600
        packet, pid = exchange(path, Packet(b"hello"), 5.0)
        assert giver.wait(10) == 0
    assert (packet.data, pid) == (b"hello!", giver.pid)
    assert packet.descriptor is not None
    assert not os.get_inheritable(packet.descriptor)
    assert os.pread(packet.descriptor, 100, 0) == b"made elsewhere"
    packet.close()


def test_the_sender_keeps_its_own_descriptor(tmp_path: Path) -> None:
    got: list[Packet] = []

    def answer(connection: socket.socket) -> None:
        got.append(descriptors.receive(connection))
        descriptors.send(connection, Packet(b"ok"))

    thread = answering(tmp_path / "s", answer)
    own = os.memfd_create("test")
    packet, _ = exchange(tmp_path / "s", Packet(b"take", own), 5.0)
    thread.join()
    assert packet == Packet(b"ok", None)
    assert got[0].descriptor is not None
    assert os.path.sameopenfile(own, got[0].descriptor)
    got[0].close()
    os.close(own)


def test_nobody_there_a_hang_up_and_silence_are_errors_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        exchange(tmp_path / "nobody", Packet(b"x"), 1.0)
    thread = answering(tmp_path / "rude", lambda connection: None)
    with pytest.raises(OSError):
        exchange(tmp_path / "rude", Packet(b"x"), 1.0)
    thread.join()
    with listen(tmp_path / "frozen"), pytest.raises(TimeoutError):
        exchange(tmp_path / "frozen", Packet(b"x"), 0.05)


def test_two_cannot_listen_at_one_place(tmp_path: Path) -> None:
    with listen(tmp_path / "s"), pytest.raises(OSError):
        listen(tmp_path / "s")
