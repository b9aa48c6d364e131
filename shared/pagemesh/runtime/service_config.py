"""What ``pagemesh serve ROLE`` passes to ``pagemesh.ROLE.service.run(config, stop)``: the
configuration of every concern, parsed once. A service reads the parts that it needs.

By the time a service sees it, ``worker.model`` is an existing local folder (never empty and
never a hub id) and ``host.name`` is set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from pagemesh.runtime.config import load, to_environ
from pagemesh.runtime.settings import (
    BusConfig,
    GatewayConfig,
    HostConfig,
    PagerConfig,
    TelemetryConfig,
    WorkerConfig,
)
from pagemesh.wire.errors import ConfigError

_PAGER = PagerConfig()
BEAT_LATE_MS_MAX = 200
"""How long a worker may delay a heartbeat while leases change hands."""


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """The configuration of one service process."""

    bus: BusConfig
    host: HostConfig
    pager: PagerConfig
    worker: WorkerConfig
    gateway: GatewayConfig
    telemetry: TelemetryConfig


def load_service_config(
    environ: Mapping[str, str], flags: Mapping[str, str] | None = None
) -> ServiceConfig:
    """Every part from the environment, flags on top. Raises ``ConfigError``."""
    config = ServiceConfig(
        bus=load(BusConfig, environ, flags),
        host=load(HostConfig, environ, flags),
        pager=load(PagerConfig, environ, flags),
        worker=load(WorkerConfig, environ, flags),
        gateway=load(GatewayConfig, environ, flags),
        telemetry=load(TelemetryConfig, environ, flags),
    )
    _check_beats(config.pager)
    return config


def _check_beats(pager: PagerConfig) -> None:
    """Raises ``ConfigError`` if leases of live workers could end because of a late heartbeat."""
    least_ms = 2 * pager.heartbeat_ms + BEAT_LATE_MS_MAX
    if pager.session_ttl_ms < least_ms:
        raise ConfigError(
            f"PAGEMESH_SESSION_TTL_MS={pager.session_ttl_ms} (--session-ttl-ms) is too short for "
            f"workers with a heartbeat every {pager.heartbeat_ms} ms: give {least_ms} or more, or "
            "lower PAGEMESH_PAGER_HEARTBEAT_MS (--pager-heartbeat-ms)"
        )


def tier_without_place(pager: PagerConfig) -> str:
    """What is wrong with the size of a tier without a place, in words for people; else empty."""
    if pager.disk_dir:
        return ""
    for name, flag, is_vain in (
        ("DISK_BYTES", "--disk-bytes", pager.disk_bytes != _PAGER.disk_bytes),
        # What leaves a device for the host's memory waits there too.
        ("DISK_STAGING_BYTES", "--disk-staging-bytes",
         pager.disk_staging_bytes and not pager.host_bytes),
    ):  # fmt: skip
        if is_vain:
            return (
                f"PAGEMESH_{name} ({flag}) without PAGEMESH_DISK_DIR (--disk-dir): no pages are "
                "kept on disk; name a folder for them, or leave it out"
            )
    return ""


def service_environ(config: ServiceConfig) -> dict[str, str]:
    """The variables that make ``load_service_config`` give back ``config``, secrets included."""
    out: dict[str, str] = {}
    for part in dataclasses.fields(config):
        out |= to_environ(getattr(config, part.name))
    return out
