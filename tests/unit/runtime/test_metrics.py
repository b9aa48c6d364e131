"""Metrics: one registry, one prefix, an endpoint when asked for."""

from __future__ import annotations

import urllib.request

import pytest

from pagemesh.runtime import metrics
from pagemesh.runtime.ports import free_port
from pagemesh.runtime.settings import TelemetryConfig
from pagemesh.wire.errors import ConfigError

_things = metrics.counter("test_things_total", "Things.", ["kind"])


def test_every_name_has_the_prefix() -> None:
    _things.labels("a").inc(2)
    text = metrics.render().decode()
    assert 'pagemesh_test_things_total{kind="a"} 2.0' in text
    names = {line.split("{")[0].split()[0] for line in text.splitlines() if line[:1] != "#"}
    assert all(name.startswith("pagemesh_") for name in names)
    assert not [name for name in names if name.endswith("_created")]


def test_the_endpoint_serves_while_it_is_open_and_frees_its_port() -> None:
    config = TelemetryConfig(metrics_port=free_port())
    for _ in range(2):
        with metrics.serve_metrics(config):
            url = f"http://127.0.0.1:{config.metrics_port}/metrics"
            with urllib.request.urlopen(url, timeout=5) as answer:
                assert b"pagemesh_" in answer.read()


def test_a_name_that_no_host_has_is_a_config_error_that_names_it() -> None:
    config = TelemetryConfig(metrics_host="a..b", metrics_port=free_port())
    with (
        pytest.raises(ConfigError, match=r"PAGEMESH_METRICS_HOST='a\.\.b'"),
        metrics.serve_metrics(config),
    ):
        pytest.fail("nobody listens there")


def test_a_taken_port_is_a_config_error_that_names_it() -> None:
    config = TelemetryConfig(metrics_port=free_port())
    with (
        metrics.serve_metrics(config),
        pytest.raises(ConfigError, match=f"PAGEMESH_METRICS_PORT={config.metrics_port}"),
        metrics.serve_metrics(config),
    ):
        pytest.fail("the port is taken")
