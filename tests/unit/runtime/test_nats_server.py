"""A NATS server of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagemesh.runtime.nats_server import NatsServer


@pytest.mark.parametrize(("ours", "its"), [(None, "1"), ("3", "3")])
def test_it_computes_in_one_thread_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: str | None, its: str
) -> None:
    monkeypatch.delenv("GOMAXPROCS", raising=False)
    if ours is not None:
        monkeypatch.setenv("GOMAXPROCS", ours)
    with NatsServer(tmp_path) as server:
        environment = Path(f"/proc/{server.pid}/environ").read_text().split("\0")
    assert f"GOMAXPROCS={its}" in environment
