"""Finds, before anything is started, what would stop a mesh seconds after its start.

The services check the same things by the same code; checking here first gives one line of error
instead of a mesh that is half up.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pagemesh.cli.mesh.gpu_check import Gpu, check_gpu_room
from pagemesh.cli.planning.formats import FORMATS
from pagemesh.cli.planning.memory import page_shape
from pagemesh.cli.planning.shape import ModelShape, read_shape
from pagemesh.cli.planning.weights import weights_of
from pagemesh.engine.coverage import inexact, path_in
from pagemesh.engine.files import cache_folder
from pagemesh.gateway.doors.tenants import Tenants
from pagemesh.kernels.native.library import check_level
from pagemesh.kernels.native.locks import holder_is_dead
from pagemesh.pager.storage.disk_file import DiskPlace
from pagemesh.runtime.bus.tls import tls_context
from pagemesh.runtime.model_folder import read_config, tokenizer_file
from pagemesh.runtime.model_types import compute_type, page_type
from pagemesh.runtime.service_config import ServiceConfig, tier_without_place
from pagemesh.runtime.sizes import exact_size, shown_binary
from pagemesh.wire.errors import ConfigError
from pagemesh.wire.pool_format import IN_FILE, PoolFormat


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The pool of a mesh with a given model and settings."""

    form: PoolFormat
    context_tokens_max: int

    @property
    def tokens(self) -> int:
        return self.form.page_count * self.form.page_size

    @property
    def shortfall(self) -> str:
        """The warning for a pool smaller than the model's context; empty otherwise."""
        if self.tokens >= self.context_tokens_max:
            return ""
        pages = -(-self.context_tokens_max // self.form.page_size)
        return (
            f"pool: holds {self.tokens:,} tokens, fewer than the {self.context_tokens_max:,} of "
            "the model's context; longer requests are refused; --pool-bytes "
            f"{exact_size(_round_up(pages * self.form.page_bytes))} takes them"
        )


def check_settings(config: ServiceConfig, *, own_nats: bool) -> None:
    """Raises ``ConfigError`` for settings that are invalid or contradict each other; does not ask
    any GPU, disk or server."""
    _ = config.telemetry.traces_url
    gate = config.gateway
    _ = Tenants(gate.api_keys.reveal(), config.host.secret.reveal_bytes(), gate.tenant_limits)
    _ = gate.page_origins
    config.worker.check_supported()
    if config.worker.cpu_level:  # on any device: native code writes page headers
        check_level(config.worker.cpu_level)
    if config.worker.device == "cpu" and config.pager.host_bytes:
        raise ConfigError(
            f"PAGEMESH_HOST_BYTES={config.pager.host_bytes} (--host-bytes): on a CPU, pages "
            "are in the host's memory already; leave it out, or raise --pool-bytes"
        )
    if why := tier_without_place(config.pager):
        raise ConfigError(why)
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if config.pager.disk_dir and config.pager.host_bytes > memory_bytes:  # else see check_room
        raise ConfigError(
            f"PAGEMESH_HOST_BYTES={config.pager.host_bytes} (--host-bytes): this machine has "
            f"{shown_binary(memory_bytes)} of memory; give less"
        )
    if not own_nats:
        _ = config.bus.servers
        tls_context(config.bus)
    elif config.bus.demands_tls:
        raise ConfigError(
            "PAGEMESH_NATS_TLS_CA or PAGEMESH_NATS_TLS_CERT is set, but the server that up starts "
            "has no TLS; name one that has with --nats, or unset them"
        )
    elif config.bus.user or config.bus.password.is_set:
        raise ConfigError(
            "PAGEMESH_NATS_USER (--nats-user) or PAGEMESH_NATS_PASSWORD is set, and the server "
            "that up starts has users of its own; name yours with --nats, or unset them"
        )


def check_device_room(
    gpu: Gpu, config: ServiceConfig, shape: ModelShape, worker_count: int
) -> None:
    """Raises ``ConfigError`` unless pool, weights and graphs of ``worker_count`` workers fit on
    ``gpu``, as far as the model's files tell."""
    folder = Path(config.worker.model)
    model = read_config(folder / "config.json")
    dtype = compute_type(config.worker, shape.stored)
    weights = weights_of(folder, model, shape, dtype, on_cpu=False)
    check_gpu_room(gpu, config, model, shape, weights, worker_count)


def check_model(folder: Path, *, deterministic: bool) -> None:
    """Raises ``ConfigError`` for an architecture that the engine does not support, or not for
    ``deterministic`` answers, a broken config.json or a missing tokenizer."""
    if path_in(folder) == "fallback" and deterministic:
        raise inexact(folder)
    tokenizer_file(folder)


def known_shape(folder: Path) -> ModelShape | None:
    """The shape of the model in ``folder``; None if its config.json omits defaults of the family's
    code that are not known here. The workers know them."""
    try:
        return read_shape(read_config(folder / "config.json"), f"model {folder}")
    except ConfigError:
        return None


def plan_pool(config: ServiceConfig, shape: ModelShape) -> PoolPlan:
    """The pool of a mesh. Raises ``ConfigError`` when no page can hold K and V of the model, or
    when the pool cannot hold a page."""
    page_size, pool_bytes = config.worker.page_size, config.pager.pool_bytes
    kv = FORMATS[page_type(config.worker, shape.stored)]
    size = page_shape(shape, kv, page_size, 1).page_bytes
    if pool_bytes < size:
        raise ConfigError(
            f"PAGEMESH_POOL_BYTES={pool_bytes} (--pool-bytes) holds no page of {size} bytes; "
            "raise it, or use smaller pages (--page-size)"
        )
    place = IN_FILE if config.worker.device == "cpu" else config.worker.device
    form = PoolFormat(pool_bytes // size, page_size, size, place)
    return PoolPlan(form, shape.context_tokens_max)


def pool_file_bytes(config: ServiceConfig, pool: PoolPlan | None) -> int:
    """The least that the pool takes in the pool folder: all of it, or, with pages on a device, the
    headers and the host tier. Without a ``pool``, as far as the settings tell."""
    tier_bytes = 0 if config.pager.disk_dir else config.pager.host_bytes
    if pool is not None:
        return pool.form.file_bytes + tier_bytes
    return config.pager.pool_bytes if config.worker.device == "cpu" else tier_bytes


def check_cache(named: str) -> Path:
    """The folder for prepared weights, which exists or can be made. Raises ``ConfigError``."""
    folder = cache_folder(named)
    if why := _unusable(folder):
        raise ConfigError(f"PAGEMESH_CACHE_DIR={folder} (--cache-dir): {why}; name another")
    return folder


def check_disk(folder: Path, host: str) -> None:
    """Raises ``ConfigError`` unless pages of ``host`` can be kept in ``folder``, which exists or
    can be made. A full or failing disk is left to the pager, which then serves without it."""
    if why := _unusable(folder):
        raise _no_disk(folder, why)
    try:
        is_taken = not holder_is_dead(DiskPlace(folder, host, 0, b"").path("index"))
    except OSError as error:
        raise _no_disk(folder, f"cannot be written ({str(error.strerror).lower()})") from None
    if is_taken:
        raise _no_disk(folder, "another mesh keeps its pages there")


def _unusable(folder: Path) -> str:
    """Why ``folder`` cannot be written to, or made if it does not exist; empty if it can."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:
        return str(error.strerror).lower()
    named = "" if existing == folder else f"{existing} "
    if not existing.is_dir():
        return f"{existing} is not a folder" if named else "not a folder"
    try:
        _try_to_write(existing)
    except OSError as error:
        return f"{named}cannot be written ({str(error.strerror).lower()})"
    return ""


def disk_shortfall(folder: Path, host: str, bytes_max: int) -> str:
    """The warning for a disk with less room than the ``bytes_max`` that pages of ``host`` may take:
    on a full disk the tier is switched off instead of evicting. Empty otherwise."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    pages = DiskPlace(folder, host, bytes_max, b"").path("pages")
    free = shutil.disk_usage(existing).free
    free += pages.stat().st_blocks * 512 if pages.exists() else 0
    if free >= bytes_max:
        return ""
    return (
        f"{folder} has {shown_binary(free)} for pages, fewer than --disk-bytes "
        f"({shown_binary(bytes_max)}); the tier is switched off when the disk is full, so lower it"
    )


def _no_disk(folder: Path, why: str) -> ConfigError:
    return ConfigError(f"PAGEMESH_DISK_DIR={folder} (--disk-dir): {why}; name another")


def check_room(folder: Path, wanted_bytes: int, orphan_bytes: int = 0) -> str:
    """Check that a pool of ``wanted_bytes`` fits into ``folder``; returns the result as text for
    people. ``orphan_bytes`` are taken by pools that the next mesh adopts or removes, and count as
    free. Raises ``ConfigError``."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free + orphan_bytes
        _try_to_write(existing)
    except OSError as error:
        why = str(error.strerror).lower()
        raise ConfigError(
            f"PAGEMESH_POOL_DIR={folder} (--pool-dir): cannot be written ({why}); name another"
        ) from None
    if free < wanted_bytes:
        raise ConfigError(
            f"PAGEMESH_POOL_DIR={folder}: {shown_binary(free)} free, the pool takes "
            f"{shown_binary(wanted_bytes)}; lower PAGEMESH_POOL_BYTES (--pool-bytes), or give the "
            "file system more (containers: --shm-size)"
        )
    return f"{folder}, {shown_binary(free)} free, the pool takes {shown_binary(wanted_bytes)}"


def _try_to_write(folder: Path) -> None:
    """Create and remove a folder in ``folder``. Checking permissions would not do: root has them
    everywhere, even on a read-only disk. Raises ``OSError``, but not for a full file system."""
    try:
        Path(tempfile.mkdtemp(prefix=".pagemesh-", dir=folder)).rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def _round_up(count_bytes: int) -> int:
    """Round up to whole MiB."""
    return -(-count_bytes // (1 << 20)) * (1 << 20)
