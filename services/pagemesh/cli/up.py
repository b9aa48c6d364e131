"""``pagemesh up``: a whole mesh on this machine, from one command until Ctrl-C.

Starts NATS (unless given a server), pager, workers and gateway as child processes, shows their
progress, prints one ``ready`` line, restarts what dies, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from pagemesh.cli.mesh.children import OWN_ERROR, STARTED, ChildLimits, wait_without_threads
from pagemesh.cli.mesh.gpu_check import check_gpu
from pagemesh.cli.mesh.plan_mesh import NatsServer, plan_nats, plan_services
from pagemesh.cli.mesh.readiness import Members, become_ready, tell_of_returns
from pagemesh.cli.mesh.restarts import RestartLimits
from pagemesh.cli.mesh.roster import check_host_is_free
from pagemesh.cli.mesh.run_folder import (
    GATEWAY,
    SECRET_NAME,
    RunFolder,
    has_damaged_secret,
    orphan_pool_bytes,
    run_folder,
    url_file_name,
    write_private,
)
from pagemesh.cli.mesh.screen import Screen, announce, fitted
from pagemesh.cli.mesh.start_checks import (
    check_cache,
    check_device_room,
    check_disk,
    check_model,
    check_room,
    check_settings,
    disk_shortfall,
    known_shape,
    plan_pool,
    pool_file_bytes,
)
from pagemesh.cli.mesh.stopping import drain, stop_signals
from pagemesh.cli.mesh.supervisor import Supervisor, supervised
from pagemesh.cli.mesh.up_config import (
    UpConfig,
    check_metrics_ports,
    for_device,
    http_url,
    is_loopback,
    starts_nats,
    with_free_port,
    with_http,
)
from pagemesh.cli.mesh.watch import WatchLimits
from pagemesh.cli.options import Sectioned, check_variables, config_flags, given_flags
from pagemesh.gateway.api.sampling_defaults import sampling_defaults
from pagemesh.runtime.bus import Bus
from pagemesh.runtime.config import Secret, load
from pagemesh.runtime.ids import new_service_name
from pagemesh.runtime.logs import set_up_logs
from pagemesh.runtime.model_folder import find_model, is_hub_id
from pagemesh.runtime.model_types import with_types
from pagemesh.runtime.origins import ANY_ORIGIN
from pagemesh.runtime.service_config import ServiceConfig, load_service_config
from pagemesh.runtime.settings import (
    BusConfig,
    GatewayConfig,
    HostConfig,
    PagerConfig,
    TelemetryConfig,
    WorkerConfig,
)
from pagemesh.wire.errors import ConfigError, Fault, PagemeshError

_GRACE_MS = 5_000
"""Time to stop for a mesh that never served or that a failure ends; running requests get no
more."""
_KEEP_S = 5.0
"""How often to restore what was deleted from the folder that the mesh is found by."""
up_flags = config_flags(
    UpConfig, WorkerConfig, GatewayConfig, PagerConfig, BusConfig, HostConfig, TelemetryConfig,
    defaults={"PAGEMESH_NATS": "a server of its own", "PAGEMESH_LOG_LEVEL": "warning"},
    without=("PAGEMESH_NAME", "PAGEMESH_PAGER_KILL_HOLDERS"),
)  # fmt: skip
"""The flags that configure the mesh; `pagemesh doctor` takes the same."""


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """``own_nats``: no server was named, so one is started."""

    up: UpConfig
    config: ServiceConfig
    own_nats: bool


@click.command(cls=Sectioned)
@up_flags
def up(**arguments: Any) -> int:
    """Start the whole mesh on this machine and print its URL."""
    check_variables()
    screen = Screen()
    wait_without_threads()
    return asyncio.run(run_mesh(plan(os.environ, given_flags(arguments), screen), screen))


def plan(environ: Mapping[str, str], flags: Mapping[str, str], screen: Screen) -> MeshPlan:
    """Settle the configuration and check all of it that can be checked before a process is started.
    Raises ``ConfigError``."""
    # A worker's default level would bury the ready line.
    config = load_service_config({"PAGEMESH_LOG_LEVEL": "warning", **environ}, flags)
    settings = for_device(load(UpConfig, environ, flags), config, {**environ, **flags})
    config = with_free_port(with_http(config, settings.http, flags))
    own_nats = starts_nats({**environ, **flags})
    check_metrics_ports(config, settings.service_count)
    check_settings(config, own_nats=own_nats)
    gpu = check_gpu(config) if config.worker.device == "cuda" else None
    disk = config.pager.disk_folder
    if disk is not None:
        check_disk(disk, config.host.host)
    check_cache(config.worker.cache_dir)
    asked = config.worker.model
    if is_hub_id(asked):
        screen.line(f"model: fetching {asked}")
    check = partial(check_model, deterministic=config.worker.deterministic)
    found = find_model(asked, inspect=check)
    name = config.worker.model_name or found.name
    config = replace(
        config,
        worker=with_types(replace(config.worker, model=str(found.path), model_name=name)),
        pager=replace(config.pager, kill_holders=True),  # `up` restarts those it kills
    )
    shape, folder = known_shape(found.path), config.host.pool_dir
    if gpu is not None and shape is not None:
        check_device_room(gpu, config, shape, settings.worker_count)
    pool = None if shape is None else plan_pool(config, shape)
    check_room(folder, pool_file_bytes(config, pool), orphan_pool_bytes(folder))
    if pool is not None and pool.shortfall:
        screen.line(pool.shortfall)
    if disk is not None:
        if shortfall := disk_shortfall(disk, config.host.host, config.pager.disk_bytes):
            screen.line(f"disk: {shortfall}")
    defaults = sampling_defaults(found.path, config.gateway.generation_config)
    if defaults.recommended:
        screen.line(
            f"sampling: {defaults} unless a request says otherwise, as the model recommends; "
            "--generation-config none uses OpenAI's defaults instead"
        )
    if not config.gateway.api_keys.is_set and not is_loopback(config.gateway.http_host):
        screen.line(
            f"open: anyone who can reach {config.gateway.http_host} may use this mesh; set "
            "PAGEMESH_API_KEYS to require a key"
        )
    elif not config.gateway.api_keys.is_set and ANY_ORIGIN in config.gateway.page_origins:
        screen.line(
            "open: any web page that a browser on this machine shows may use this mesh; "
            "name origins with --cors-origins, or set PAGEMESH_API_KEYS"
        )
    return MeshPlan(settings, config, own_nats)


async def run_mesh(plan: MeshPlan, screen: Screen) -> int:
    """Run until a signal. Raises ``PagemeshError`` when the mesh cannot start or go on."""
    set_up_logs(replace(plan.config.telemetry, log_level="error"), service="up")
    if not plan.own_nats:  # fail early: no service can work without that server
        name = new_service_name("up")
        async with Bus.connect(plan.config.bus, role="operator", name=name) as bus:
            await check_host_is_free(bus, plan.config.host.host)
    with run_folder(plan.config.host.pool_dir, plan.config.host.host) as folder:
        if folder.adopted:
            screen.line(f"pool: adopted what a killed mesh left in {folder.path}")
        disk = plan.config.pager.disk_folder
        if disk is not None and has_damaged_secret(disk):
            screen.line(
                f"disk: the secret in {disk} is damaged; pages stored there can no longer be found"
            )
        config = for_eyes(_in_folder(plan.config, folder))
        nats = plan_nats(folder) if plan.own_nats else None
        files = {folder.path / url_file_name(GATEWAY): http_url(config) + "\n"}
        if nats is None:  # for `pagemesh cache` and `audit`, as with a server of our own
            files[folder.path / url_file_name("operator")] = config.bus.url + "\n"
        for path, text in files.items():
            write_private(path, text)
        if nats is not None:
            files |= nats.spec.files
        if not plan.config.host.secret.is_set:
            files[folder.path / SECRET_NAME] = config.host.secret.reveal()
        services = plan_services(plan.up, config, nats)
        specs = (*([nats.spec] if nats else []), *services)
        limits = ChildLimits(
            RestartLimits(exit_count_max=plan.up.exit_count_max),
            WatchLimits(silence_ms_max=plan.up.silence_ms_max),
        )
        with screen:
            for spec in specs:
                screen.expect(spec.name)
            members = Members([spec.name for spec in services], config, nats)
            async with _kept(folder, files), supervised(
                specs, limits=limits, grace_ms=_GRACE_MS,
                on_line=lambda name, line: _pass_on(screen, name, line),
                on_change=lambda name, state: _show(screen, members, name, state),
            ) as mesh:  # fmt: skip
                stop = stop_signals(mesh, screen)
                started = time.monotonic()
                ready = become_ready(members, screen, timeout_ms=plan.up.start_timeout_ms)
                if not await _unless_stopped(ready, mesh, stop):
                    return 0
                screen.settle()
                seconds = time.monotonic() - started
                announce(fitted(*_ready(plan, config, nats, folder, seconds), width=_width()))
                await _unless_stopped(tell_of_returns(members, screen), mesh, stop)
                await drain(mesh, screen, drain_ms=config.host.drain_ms)
    return 0


@contextlib.asynccontextmanager
async def _kept(folder: RunFolder, files: Mapping[Path, str]) -> AsyncIterator[None]:
    """While inside, restore ``files`` and ``folder`` periodically; see ``RunFolder.keep``."""

    async def keep() -> None:
        while True:
            await asyncio.sleep(_KEEP_S)
            # The disk may be full, or another `up` may have the folder: try again later.
            with contextlib.suppress(OSError, ConfigError):
                folder.keep(files)

    keeping = asyncio.create_task(keep(), name="keep-folder")
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


def _in_folder(config: ServiceConfig, folder: RunFolder) -> ServiceConfig:
    host = replace(config.host, pool_dir=folder.path)
    if not host.secret.is_set:
        host = replace(host, secret=Secret(folder.secret(config.pager.disk_folder)))
    return replace(config, host=host)


def for_eyes(config: ServiceConfig) -> ServiceConfig:
    """``config`` with logs for people if our stderr is a terminal: the services' logs pass through
    this process, so they cannot see that themselves."""
    log_format = config.telemetry.log_format
    if log_format != "auto" or sys.stderr is None or not sys.stderr.isatty():
        return config
    return replace(config, telemetry=replace(config.telemetry, log_format="console"))


def _show(screen: Screen, members: Members, name: str, state: str) -> None:
    screen.change(name, state)
    if state == STARTED:
        members.started.set()


def _pass_on(screen: Screen, name: str, line: str) -> None:
    """Print a child's line. Dropped are routine lines of the NATS server, which has no log level to
    set, and configuration errors, which are reported when the child has exited."""
    chatter = name == "nats" and ("[INF]" in line or "Plaintext passwords" in line)
    if line and not chatter and not OWN_ERROR.match(line):
        screen.line(line)


async def _unless_stopped(work: Any, mesh: Supervisor, stop: asyncio.Event) -> bool:
    """Whether ``work`` ended before a signal came. Raises the error of a child that failed or of
    ``work``, and ``_StartTimeout`` when ``work`` timed out."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    failed = asyncio.ensure_future(mesh.failed())
    waiting = (task, stopped, failed)
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            raise failed.result()
        if stopped.done():
            return False
        try:
            task.result()
        except TimeoutError:
            raise _StartTimeout("the mesh was not ready in time; see --start-timeout-ms") from None
        except Fault as error:
            raise _StartTimeout(f"cannot watch the mesh: {error}") from None
        return True
    finally:
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


class _StartTimeout(PagemeshError):
    """The mesh was not ready in time, or the bus could not be watched for it."""


def _ready(
    plan: MeshPlan,
    config: ServiceConfig,
    nats: NatsServer | None,
    folder: RunFolder,
    seconds: float,
) -> tuple[str, tuple[str, ...]]:
    """The head of the ready line, and the facts that follow it."""
    bus = (
        f"nats door: {folder.path / url_file_name('client')}"
        if nats
        else f"nats: {config.bus.shown_url}"
    )
    worker = config.worker
    types = "" if worker.device == "cpu" else f" in {worker.dtype}, K and V in {worker.kv_dtype},"
    workers = (
        f"{worker.model_name}{types} on {plan.up.prefill_count} prefill + "
        f"{plan.up.decode_count} decode, {seconds:.1f} s"
    )
    return f"ready {http_url(config)}", (workers, bus)


def _width() -> int | None:
    """Columns of the terminal; None if stdout is not one and may be parsed."""
    if sys.stdout is None or not sys.stdout.isatty():  # None: it was closed before we began
        return None
    return shutil.get_terminal_size().columns
