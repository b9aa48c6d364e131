"""Prometheus metrics: one registry a process, every name prefixed with ``pagemesh_``.

Make metrics at import time, at module level. Labels take values from small, fixed sets
(roles, codes, reasons): never ids, names from clients or texts of errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
    start_http_server,
)

from pagemesh.runtime.settings import TelemetryConfig
from pagemesh.wire.errors import ConfigError

PREFIX = "pagemesh_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
REGISTRY = CollectorRegistry()
# They would be one more series for each metric, which no dashboard uses.
disable_created_metrics()  # type: ignore[no-untyped-call]


def counter(name: str, help: str, labels: Sequence[str] = ()) -> Counter:
    """``name`` without prefix, ending in ``_total``."""
    return Counter(PREFIX + name, help, labels, registry=REGISTRY)


def gauge(name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
    return Gauge(PREFIX + name, help, labels, registry=REGISTRY)


def histogram(
    name: str,
    help: str,
    labels: Sequence[str] = (),
    *,
    buckets: Sequence[float] = SECONDS_BUCKETS,
) -> Histogram:
    """``name`` ends in its unit, such as ``_seconds``."""
    return Histogram(PREFIX + name, help, labels, registry=REGISTRY, buckets=buckets)


def render() -> bytes:
    """Everything in Prometheus' text format (``CONTENT_TYPE``)."""
    return generate_latest(REGISTRY)


@contextlib.contextmanager
def serve_metrics(config: TelemetryConfig) -> Iterator[None]:
    """Serve ``/metrics`` for as long as the context lasts, if a port is configured. Raises
    ``ConfigError`` when the port is taken."""
    if config.metrics_port == 0:
        yield
        return
    try:
        server, thread = start_http_server(
            config.metrics_port, config.metrics_host, registry=REGISTRY
        )
    except OSError as error:
        raise ConfigError(
            f"PAGEMESH_METRICS_PORT={config.metrics_port} cannot be used: {error.strerror}"
        ) from None
    except UnicodeError:
        raise ConfigError(
            f"PAGEMESH_METRICS_HOST={config.metrics_host[:80]!r} is not the name of a host"
        ) from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
