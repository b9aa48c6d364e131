"""``pagemesh serve ROLE``: one service in this process.

Only the module of that service is imported, and only here, so that gateway and pager never load
torch. It defines ``async def run(config: ServiceConfig, stop: Stop) -> None``, which drains and
returns once ``stop`` is set.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from pagemesh.cli.interrupts import EndAtOnce
from pagemesh.cli.mesh.leash import leash
from pagemesh.cli.options import Sectioned, check_variables, config_flags, given_flags
from pagemesh.kernels.native.library import bound_spinning
from pagemesh.runtime.config import options, to_environ
from pagemesh.runtime.ids import new_service_name, to_name
from pagemesh.runtime.model_folder import find_model
from pagemesh.runtime.service import run_service
from pagemesh.runtime.service_config import ServiceConfig, load_service_config
from pagemesh.runtime.settings import (
    BusConfig,
    GatewayConfig,
    HostConfig,
    PagerConfig,
    TelemetryConfig,
    WorkerConfig,
)
from pagemesh.wire.errors import ConfigError

_SHARED = (BusConfig, HostConfig, TelemetryConfig)
ROLES: Mapping[str, tuple[type[object], ...]] = {
    "gateway": (GatewayConfig, WorkerConfig, *_SHARED),
    "pager": (PagerConfig, *_SHARED),
    "prefill": (WorkerConfig, *_SHARED),
    "decode": (WorkerConfig, *_SHARED),
}
_UNREAD = {
    "gateway": {option.variable for option in options(WorkerConfig)}
    - {"PAGEMESH_MODEL", "PAGEMESH_MODEL_NAME"}
}
"""Settings of a role that it has no use for: they get no flag."""
_WITH_MODEL = frozenset({"gateway", "prefill", "decode"})


@click.group()
def serve() -> None:
    """Run one service, configured by flags and PAGEMESH_* variables."""


def service_config(
    role: str, environ: Mapping[str, str], flags: Mapping[str, str]
) -> ServiceConfig:
    """The configuration of a service of ``role``. Raises ``ConfigError``."""
    config = load_service_config(environ, flags)
    name = to_name(config.host.name, fallback="") or new_service_name(role)
    config = replace(config, host=replace(config.host, name=name))
    if role in _WITH_MODEL:
        found = find_model(config.worker.model)
        shown = config.worker.model_name or found.name
        worker = replace(config.worker, model=str(found.path), model_name=shown)
        config = replace(config, worker=worker)
    return config


def _refuse_address_of_up(environ: Mapping[str, str]) -> None:
    """Raises ``ConfigError`` if ``PAGEMESH_HTTP`` is set: ignoring it would silently put the
    gateway at another address than the user meant."""
    if "PAGEMESH_HTTP" in environ:
        raise ConfigError(
            "PAGEMESH_HTTP is for `pagemesh up`; for a gateway, set PAGEMESH_HTTP_HOST "
            "(--http-host) and PAGEMESH_HTTP_PORT (--http-port)"
        )


def leave_lost_folder() -> None:
    """Leave a working folder that was removed, perhaps since `up` was started in it: there MKL,
    which only workers load, ends the process."""
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")


def _command(role: str, kinds: tuple[type[object], ...]) -> click.Command:
    @click.command(role, cls=Sectioned, help=f"Run a {role} service in this process.")
    @click.option("--parent-pid", type=int, default=None, hidden=True)
    @click.option("--pulse-fd", type=int, default=None, hidden=True)
    @config_flags(*kinds, without=_UNREAD.get(role, ()))
    def command(parent_pid: int | None, pulse_fd: int | None, **arguments: Any) -> int:
        if parent_pid is not None:
            leash(parent_pid)
        elif role == "gateway":
            _refuse_address_of_up(os.environ)
        check_variables()
        config = service_config(role, os.environ, given_flags(arguments))
        os.environ.update(to_environ(config.worker))  # kernels read their own variables
        bound_spinning()
        if role in ("prefill", "decode"):
            leave_lost_folder()
        with EndAtOnce():
            module = importlib.import_module(f"pagemesh.{role}.service")
        return run_service(
            lambda stop: module.run(config, stop),
            service=role,
            name=config.host.name,
            telemetry=config.telemetry,
            drain_ms=config.host.drain_ms,
            pulse_fd=pulse_fd,
        )

    return command


for _role, _kinds in ROLES.items():
    serve.add_command(_command(_role, _kinds))
