"""``pagemesh health`` is what containers ask, and people who are in a hurry."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from pagemesh.cli.main import run


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/health/ready"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/health/ready"),
        ("http://127.0.0.1:8000?a=1", "http://127.0.0.1:8000/health/ready?a=1"),
        ("http://127.0.0.1:9100/metrics", "http://127.0.0.1:9100/metrics"),
    ],
)
def test_a_gateway_is_asked_whether_it_would_serve_when_no_path_is_named(
    monkeypatch: pytest.MonkeyPatch, url: str, asked: str
) -> None:
    seen: list[str] = []

    def get(url: str, **_: object) -> httpx.Response:
        seen.append(url)
        return httpx.Response(200)

    monkeypatch.setattr(httpx, "get", get)
    assert run(["health", url]) == 0
    assert seen == [asked]


def test_nobody_there_is_told_without_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["health", "http://127.0.0.1:1/metrics"]) == 1
    assert capsys.readouterr().err == "error: http://127.0.0.1:1/metrics: connection refused\n"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"json": {"status": "not ready", "reason": "no worker is ready"}}, ", no worker is ready"),
        ({"json": {"reason": "x" * 1_000}}, ", " + "x" * 200),
        ({"json": {"reason": 3}}, ""),
        ({"json": ["reason"]}, ""),
        ({"text": "busy"}, ""),
    ],
)
def test_who_is_not_ready_is_told_with_the_reason_it_gives(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: dict[str, Any],
    told: str,
) -> None:
    monkeypatch.setattr(httpx, "get", lambda _url, **_: httpx.Response(503, **answer))
    assert run(["health", "http://h:1"]) == 1
    assert capsys.readouterr().err == f"error: http://h:1/health/ready: status 503{told}\n"
