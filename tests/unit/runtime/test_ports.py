"""Ports that are chosen stay free for whoever is started again."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pagemesh.runtime import ports
from pagemesh.runtime.ports import address_of, free_port, shown_urls, usable_port


def test_a_free_port_is_none_that_outgoing_connections_are_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "range").write_text("32768 60999")
    monkeypatch.setattr(ports, "_RANGE", tmp_path / "range")
    low, high = ports._outgoing()
    found = [free_port() for _ in range(20)]
    assert not [port for port in found if low <= port <= high]
    assert len(set(found)) > 1, "two meshes that start together would want the same"


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("32768\t60999\n", range(16_384, 32_768)),
        ("2000 40000", range(40_001, 65_536)),
        ("no numbers", range(16_384, 32_768)),
    ],
)
def test_the_larger_side_of_that_range_is_chosen_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, choices: range
) -> None:
    (tmp_path / "range").write_text(text)
    monkeypatch.setattr(ports, "_RANGE", tmp_path / "range")
    assert ports._choices(*ports._outgoing()) == choices
    assert free_port() in choices


def test_where_it_is_all_there_is_the_system_chooses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "range").write_text("1024 65535")
    monkeypatch.setattr(ports, "_RANGE", tmp_path / "range")
    assert free_port() >= 1_024


def test_a_host_that_is_not_known_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def nowhere(host: object, *_rest: object, **_more: object) -> None:
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "not known")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    with pytest.raises(OSError, match="not known"):
        free_port("nowhere.invalid")
    assert asked == ["nowhere.invalid"]


def test_what_somebody_listens_on_is_not_usable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(OSError, match="in use"):
            usable_port("127.0.0.1", taken.getsockname()[1])


def test_a_name_that_no_host_can_have_is_not_found() -> None:
    for ask in (usable_port, address_of):
        with pytest.raises(socket.gaierror, match="name or service not known"):
            ask("a..b", 8_000)


@pytest.mark.parametrize(
    ("urls", "shown"),
    [
        ("nats://bob:p@ss@h:4222", "nats://h:4222"),
        ("nats://bob:se,cret@h:4222", "nats://h:4222"),
        ("nats://bob:se/cret@h:4222", "nats://h:4222"),
        ("bob:p@ss@h:4222", "h:4222"),
        ("nats://a:1, nats://bob:p,@b:2,tls://u:p@ss@c:3", "nats://a:1, nats://b:2,tls://c:3"),
        ("nats://a:1,nats://b:2", "nats://a:1,nats://b:2"),
    ],
)
def test_nothing_of_a_password_in_a_url_is_shown(urls: str, shown: str) -> None:
    assert shown_urls(urls) == shown
