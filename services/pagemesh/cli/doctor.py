"""``pagemesh doctor``: finds what would keep a mesh from running here, and says what to do."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from pagemesh.cli.mesh.gpu_check import check_gpu
from pagemesh.cli.mesh.run_folder import check_owner, orphan_pool_bytes
from pagemesh.cli.mesh.start_checks import (
    check_cache,
    check_disk,
    check_model,
    check_room,
    check_settings,
    disk_shortfall,
    pool_file_bytes,
)
from pagemesh.cli.mesh.up_config import (
    UpConfig,
    check_metrics_ports,
    for_device,
    starts_nats,
    with_free_port,
    with_http,
)
from pagemesh.cli.options import Sectioned, check_variables, given_flags
from pagemesh.cli.up import up_flags
from pagemesh.engine.cores import usable_cores
from pagemesh.engine.cuda.toolchain import check_toolchain
from pagemesh.gateway.api.sampling_defaults import sampling_defaults
from pagemesh.pager import IS_COMPILED
from pagemesh.runtime.config import load
from pagemesh.runtime.model_folder import find_description, is_hub_id
from pagemesh.runtime.model_types import with_types
from pagemesh.runtime.nats_server import find_nats_server
from pagemesh.runtime.open_files import open_files_allowed
from pagemesh.runtime.ports import shown_address
from pagemesh.runtime.service_config import ServiceConfig, load_service_config
from pagemesh.runtime.sizes import shown_binary
from pagemesh.wire.errors import ConfigError

_COMPILE_SCRIPT = Path(__file__).parents[2] / "compile_cores.py"
_OPEN_FILES_MIN = 1_024
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was checked, what was found, and whether a mesh can run with it."""

    topic: str
    ok: bool
    text: str


@click.command(cls=Sectioned)
@up_flags
def doctor(**arguments: Any) -> int:
    """Check whether `pagemesh up` could run here with these flags and PAGEMESH_* variables.

    Nothing is started. Exits 1 if a check fails.
    """
    check_variables()
    findings = list(examine(os.environ, given_flags(arguments)))
    color = False if os.environ.get("NO_COLOR") else None  # None: on a terminal
    for finding in findings:
        mark = click.style("ok", "green") if finding.ok else click.style("no", "red")
        click.echo(f"{mark}  {finding.topic:<14} {finding.text}", color=color)
    return 0 if all(finding.ok for finding in findings) else 1


def examine(
    environ: Mapping[str, str], flags: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Finding]:
    """Check the mesh that ``up`` would start with these variables and flags (by variable). The
    text of a failed check is its ``ConfigError``. Raises ``ConfigError`` for a setting that cannot
    be read."""
    config = load_service_config(environ, flags)
    given = {**environ, **flags}
    up = for_device(load(UpConfig, environ, flags), config, given)
    config = with_http(config, up.http, flags)
    checks: dict[str, Callable[[ServiceConfig], str]] = {
        "settings": partial(_settings, own_nats=starts_nats(given)),
        "python": _python,
        "torch": _torch,
        "device": _device,
        "gpu compiler": _gpu_compiler,
        "native library": _native,
        "pager's core": _pager_core,
        "nats-server": _nats_server,
        "pool folder": _pool_folder,
        "disk folder": _disk_folder,
        "cache folder": _cache_folder,
        "limits": _limits,
        "model": _model,
        "http address": _http_address,
        "metrics ports": partial(_metrics_ports, service_count=up.service_count),
    }
    for topic, check in checks.items():
        try:
            yield Finding(topic, True, check(config))
        except ConfigError as error:
            yield Finding(topic, False, str(error))


def _settings(config: ServiceConfig, *, own_nats: bool) -> str:
    check_settings(config, own_nats=own_nats)
    return "consistent"


def _python(_config: ServiceConfig) -> str:
    return f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _torch(_config: ServiceConfig) -> str:
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("torch is not installed; run make, or pip install pagemesh again")
    try:
        found = version("torch")
    except PackageNotFoundError:
        found = "unknown version"
    return found


def _device(config: ServiceConfig) -> str:
    return str(check_gpu(config)) if config.worker.device == "cuda" else config.worker.device


def _gpu_compiler(config: ServiceConfig) -> str:
    return check_toolchain() if config.worker.device == "cuda" else "none is needed on this device"


def _native(_config: ServiceConfig) -> str:
    from pagemesh.kernels.native.library import cpu_level

    return f"loaded, {cpu_level().name.lower()}"


def _pager_core(_config: ServiceConfig) -> str:
    if IS_COMPILED:
        return "compiled"
    if not _COMPILE_SCRIPT.exists():  # an installed package has no sources to compile
        return "interpreted, half as fast"
    command = shlex.join([sys.executable, str(_COMPILE_SCRIPT)])
    return f"interpreted, half as fast; this compiles it: {command}"


def _nats_server(_config: ServiceConfig) -> str:
    path = find_nats_server()
    try:
        asked = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"cannot run {path}: {error}") from None
    return asked.stdout.strip()


def _pool_folder(config: ServiceConfig) -> str:
    folder = config.host.pool_dir
    found = check_room(folder, pool_file_bytes(config, None), orphan_pool_bytes(folder))
    check_owner(folder)
    return found


def _disk_folder(config: ServiceConfig) -> str:
    folder = config.pager.disk_folder
    if folder is None:
        return "none set (PAGEMESH_DISK_DIR)"
    check_disk(folder, config.host.host)
    shortfall = disk_shortfall(folder, config.host.host, config.pager.disk_bytes)
    return shortfall or f"{folder}, takes up to {shown_binary(config.pager.disk_bytes)}"


def _cache_folder(config: ServiceConfig) -> str:
    return f"{check_cache(config.worker.cache_dir)}, for prepared weights"


def _limits(_config: ServiceConfig) -> str:
    allowed = open_files_allowed()
    if allowed < _OPEN_FILES_MIN:
        raise ConfigError(
            f"only {allowed} open files are allowed; raise the limit to {_OPEN_FILES_MIN} or more "
            "(nofile in /etc/security/limits.conf, LimitNOFILE of a systemd unit)"
        )
    return f"{allowed} open files, {usable_cores()}"


def _http_address(config: ServiceConfig) -> str:
    with_free_port(config)
    gateway = config.gateway
    if not gateway.http_port:
        return f"any free port of {gateway.http_host}"
    return f"{shown_address(gateway.http_host, gateway.http_port)}, free"


def _metrics_ports(config: ServiceConfig, *, service_count: int) -> str:
    check_metrics_ports(config, service_count)
    first, host = config.telemetry.metrics_port, config.telemetry.metrics_host
    if not first:
        return "none set (PAGEMESH_METRICS_PORT)"
    return f"{shown_address(host, first)} to {first + service_count - 1}, free"


def _model(config: ServiceConfig) -> str:
    found = find_description(config.worker.model)
    check_model(found.path, deterministic=config.worker.deterministic)
    defaults = sampling_defaults(found.path, config.gateway.generation_config)
    drawn = f", recommends {defaults}" if defaults.recommended else ""
    if is_hub_id(config.worker.model):
        return f"{found.name}{drawn}; `up` fetches its weights, unless they are here"
    worker = with_types(replace(config.worker, model=str(found.path)))
    types = "" if worker.device == "cpu" else f", in {worker.dtype}, K and V in {worker.kv_dtype}"
    return f"{found.name} in {found.path}{types}{drawn}"
