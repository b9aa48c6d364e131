"""The settings of ``pagemesh up`` itself, beside those of the services it starts."""

from __future__ import annotations

import errno
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from pagemesh.runtime.config import setting
from pagemesh.runtime.ports import free_port, shown_address, usable_port
from pagemesh.runtime.service_config import ServiceConfig
from pagemesh.wire.errors import ConfigError

WORKER_COUNT_MAX = 64
_PORT_MAX = 65_535
_LOOPBACK_OF_ALL = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Loopback addresses for a server that listens on all addresses; all of IPv6 excludes IPv4."""


@dataclass(frozen=True, slots=True)
class UpConfig:
    """The shape of the mesh."""

    prefill_count: int = setting(
        1, "PREFILL", "Prefill workers to start. With 0, decode workers compute prompts too; "
        "that is the default with --device cuda.",
        minimum=0, maximum=WORKER_COUNT_MAX,
    )  # fmt: skip
    decode_count: int = setting(
        1, "DECODE", "Decode workers to start.", minimum=0, maximum=WORKER_COUNT_MAX
    )
    http: str = setting("", "HTTP", "HOST:PORT to serve; short for --http-host and --http-port.")
    start_timeout_ms: int = setting(
        600_000, "START_TIMEOUT_MS", "Time limit for all services to be ready, in ms.",
        minimum=1_000, maximum=86_400_000,
    )  # fmt: skip
    exit_count_max: int = setting(
        12, "EXIT_COUNT_MAX", "Exits of one service that end the mesh; a run of at least 15 s "
        "resets the count.",
        minimum=1, maximum=1_000,
    )  # fmt: skip
    silence_ms_max: int = setting(
        10_000, "SILENCE_MS_MAX", "Silence after which a service is killed and restarted, in ms. "
        "Raise it to use a debugger (one whose pages others wait for is still killed after 5 s).",
        minimum=2_000, maximum=86_400_000,
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Raises ``ConfigError`` for a mesh without workers."""
        if not self.worker_count:
            raise ConfigError("--prefill 0 --decode 0: at least one worker is needed")

    @property
    def worker_count(self) -> int:
        return self.prefill_count + self.decode_count

    @property
    def service_count(self) -> int:
        """The workers, a pager and a gateway."""
        return self.worker_count + 2


def for_device(up: UpConfig, config: ServiceConfig, given: Mapping[str, str]) -> UpConfig:
    """``up`` without prefill workers on a GPU, unless ``given`` (by variable) sets their number:
    two workers would take turns on the GPU and hold the weights twice."""
    if config.worker.device != "cuda" or "PAGEMESH_PREFILL" in given or not up.decode_count:
        return up
    return replace(up, prefill_count=0)


def starts_nats(given: Mapping[str, str]) -> bool:
    """Whether ``up`` starts a NATS server of its own: ``given`` (by variable) names none."""
    return "PAGEMESH_NATS" not in given


def with_http(
    config: ServiceConfig, address: str, flags: Mapping[str, str] = MappingProxyType({})
) -> ServiceConfig:
    """``config`` serving at ``address`` (HOST:PORT, [IPV6]:PORT or :PORT; unchanged if empty).
    ``flags`` (by variable) for host and port win over an address that comes from the environment.
    Raises ``ConfigError``, also for flags that contradict each other."""
    if not address:
        return config
    host, colon, port = address.rpartition(":")
    if not colon or not _is_port(port):
        raise ConfigError(
            f"PAGEMESH_HTTP={address[:80]!r} (--http) is not HOST:PORT, such as 127.0.0.1:8000"
        )
    given = config.gateway
    gateway = replace(given, http_host=host.strip("[]") or given.http_host, http_port=int(port))
    if "PAGEMESH_HTTP_HOST" in flags:
        gateway = replace(gateway, http_host=given.http_host)
    if "PAGEMESH_HTTP_PORT" in flags:
        gateway = replace(gateway, http_port=given.http_port)
    if "PAGEMESH_HTTP" in flags and gateway != with_http(config, address).gateway:
        raise ConfigError(
            "--http and --http-host or --http-port name different addresses; leave one out"
        )
    return replace(config, gateway=gateway)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= _PORT_MAX


def with_free_port(config: ServiceConfig) -> ServiceConfig:
    """``config`` with an HTTP port that is free. Port 0 is replaced by a free one here, because a
    restarted gateway must come back at the same port. Raises ``ConfigError``."""
    host, port = config.gateway.http_host, config.gateway.http_port
    try:
        port = usable_port(host, port) if port else free_port(host)
    except OSError as error:
        stop = "stop what listens there or " if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(
            f"cannot serve at {shown_address(host, port)}: {_reason(error)}; {stop}"
            "choose another address (pagemesh up --http HOST:PORT)"
        ) from None
    return replace(config, gateway=replace(config.gateway, http_port=port))


def check_metrics_ports(config: ServiceConfig, service_count: int) -> None:
    """Raises ``ConfigError`` unless the metrics ports of ``service_count`` services exist, are
    free, and differ from the port that the mesh serves at, even at another address."""
    telemetry = config.telemetry
    if not telemetry.metrics_port:
        return
    ports = range(telemetry.metrics_port, telemetry.metrics_port + service_count)
    named = f"PAGEMESH_METRICS_PORT={telemetry.metrics_port} (--metrics-port)"
    if ports[-1] > _PORT_MAX:
        raise ConfigError(
            f"{named} leaves too few ports for {service_count} services, one each; name a lower one"
        )
    another = f"name another; {service_count} services take one each, from that port on"
    if config.gateway.http_port in ports:
        raise ConfigError(f"{named}: the mesh serves at {config.gateway.http_port}; {another}")
    for port in ports:
        try:
            usable_port(telemetry.metrics_host, port)
        except OSError as error:
            raise ConfigError(
                f"{named}: {_reason(error)} at {shown_address(telemetry.metrics_host, port)}; "
                f"{another}"
            ) from None


def _reason(error: OSError) -> str:
    code = error.errno or 0  # negative for a failed look-up: not an errno
    return (os.strerror(code) if code > 0 else str(error.strerror)).lower()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens at ``host``. A name other than
    ``localhost`` may be any address, so it counts as reachable."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def http_url(config: ServiceConfig) -> str:
    """Where clients on this machine reach the gateway."""
    host = config.gateway.http_host
    host = _LOOPBACK_OF_ALL.get(host, host)
    return f"http://{shown_address(host, config.gateway.http_port)}"
