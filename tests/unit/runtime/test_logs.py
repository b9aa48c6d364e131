"""Logs: JSON lines with trace ids and without anybody's text."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from tests.support.full_disk import Full

from pagemesh.runtime import trace
from pagemesh.runtime.config import load
from pagemesh.runtime.logs import get_logger, set_up_logs
from pagemesh.runtime.settings import TelemetryConfig
from pagemesh.wire.errors import Busy, ConfigError


@pytest.fixture
def restored() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def logged(config: TelemetryConfig, *, error: BaseException | None = None, **facts: Any) -> str:
    stream = io.StringIO()
    set_up_logs(config, service="test", stream=stream)
    get_logger("here").warning("thing.happened", **facts, **({"error": error} if error else {}))
    return stream.getvalue()


@pytest.mark.usefixtures("restored")
def test_a_line_is_json_with_service_level_and_facts() -> None:
    line = json.loads(logged(TelemetryConfig(), pages=3))
    assert line["event"] == "thing.happened"
    assert (line["service"], line["level"], line["pages"]) == ("test", "warning", 3)
    assert "trace_id" not in line


@pytest.mark.usefixtures("restored")
def test_a_line_within_a_span_carries_its_ids() -> None:
    with trace.use(trace.new_trace()) as context:
        line = json.loads(logged(TelemetryConfig()))
    assert line["trace_id"] == f"{context.trace_id:032x}"
    assert line["span_id"] == f"{context.span_id:016x}"


def crash() -> RuntimeError:
    try:
        raise RuntimeError("the prompt was: my secret")
    except RuntimeError as error:
        return error


@pytest.mark.usefixtures("restored")
def test_the_text_of_an_exception_is_left_out_unless_asked_for() -> None:
    line = json.loads(logged(TelemetryConfig(), error=crash()))
    assert line["error"]["type"] == "RuntimeError"
    assert line["error"]["at"].startswith("test_logs.py:")  # also in a checkout named pagemesh
    assert "secret" not in json.dumps(line)
    told = logged(TelemetryConfig(log_exception_text=True), error=crash())
    assert "secret" in told


@pytest.mark.usefixtures("restored")
def test_our_own_faults_say_what_they_say() -> None:
    line = json.loads(logged(TelemetryConfig(), error=Busy("full")))
    assert line["error"] == {"type": "Busy", "text": "full"}


@pytest.mark.usefixtures("restored")
def test_nothing_a_peer_sends_makes_a_line_of_its_own() -> None:
    evil = 'x\n{"event": "forged"}\r\n\x1b[31m'
    out = logged(TelemetryConfig(), subject=evil)
    assert out.count("\n") == 1
    assert json.loads(out)["subject"] == evil


@pytest.mark.usefixtures("restored")
def test_long_texts_are_cut() -> None:
    assert len(logged(TelemetryConfig(), text="x" * 1_000_000)) < 5_000


@pytest.mark.usefixtures("restored")
def test_who_wants_no_colours_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for text in ("", "1"):
        monkeypatch.setenv("NO_COLOR", text)
        stream = Terminal()
        set_up_logs(TelemetryConfig(), service="test", stream=stream)
        get_logger("here").warning("thing.happened")
        assert "thing.happened" in stream.getvalue()
        assert ("\x1b" in stream.getvalue()) == (not text)


@pytest.mark.usefixtures("restored")
def test_what_is_below_the_level_is_not_logged() -> None:
    assert logged(TelemetryConfig(log_level="error")) == ""


@pytest.mark.usefixtures("restored")
def test_an_error_within_our_packages_is_placed_by_its_path_there() -> None:
    try:
        load(TelemetryConfig, {"PAGEMESH_TRACE_RATIO": "many"})
    except ConfigError as error:
        line = json.loads(logged(TelemetryConfig(), error=error))
    assert line["error"]["at"].startswith("runtime/config.py:")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("stream", [Full(), closed(), None], ids=["full", "closed", "none"])
@pytest.mark.parametrize("is_set_up", [False, True])
def test_a_log_that_cannot_be_written_stops_nobody(
    stream: io.StringIO | None, is_set_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    if is_set_up:
        set_up_logs(TelemetryConfig(), service="test")
    get_logger("here").warning("bus.lost")
