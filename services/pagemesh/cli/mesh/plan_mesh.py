"""From configuration to child processes: names, commands, bus users and environments."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pagemesh.cli.mesh import nats_conf
from pagemesh.cli.mesh.children import ChildSpec
from pagemesh.cli.mesh.run_folder import RunFolder, url_file_name, write_private
from pagemesh.cli.mesh.up_config import UpConfig
from pagemesh.runtime import compiled
from pagemesh.runtime.config import ENV_PREFIX, Secret
from pagemesh.runtime.nats_server import find_nats_server
from pagemesh.runtime.ports import free_port
from pagemesh.runtime.service_config import ServiceConfig, service_environ
from pagemesh.runtime.settings import BusConfig
from pagemesh.wire.subjects import BUS_ROLES, BusRole

STAGES: Mapping[str, int] = {"nats": 0, "pager": 1, "decode": 2, "prefill": 2, "gateway": 3}
URL_ROLES: tuple[BusRole, ...] = ("client", "operator")
"""Bus roles that people use: the URL of each is written to a private file, ``ROLE.url``."""


@dataclass(frozen=True, slots=True)
class NatsServer:
    """The NATS server that `up` starts: how each role connects, and the child that runs it."""

    url: str
    passwords: Mapping[BusRole, Secret]
    spec: ChildSpec

    def bus(self, config: BusConfig, role: BusRole) -> BusConfig:
        return replace(config, url=self.url, user=role, password=self.passwords[role])


def plan_nats(folder: RunFolder) -> NatsServer:
    """Plan a server on a free loopback port with fresh passwords, and write its files."""
    port = free_port()
    passwords: dict[BusRole, Secret] = {role: Secret(secrets.token_hex(24)) for role in BUS_ROLES}
    text = nats_conf.render(
        host="127.0.0.1",
        port=port,
        passwords={role: nats_conf.quoted(word.reveal()) for role, word in passwords.items()},
    )
    conf = folder.path / "nats-server.conf"
    files = {conf: text}
    for role in URL_ROLES:
        url = f"nats://{role}:{passwords[role].reveal()}@127.0.0.1:{port}\n"
        files[folder.path / url_file_name(role)] = url
    for path, content in files.items():
        write_private(path, content)
    command = (
        sys.executable, "-m", "pagemesh.cli.mesh.leash", str(os.getpid()),
        str(find_nats_server()), "-c", str(conf),
    )  # fmt: skip
    spec = ChildSpec(
        "nats", "nats", STAGES["nats"], command, _inherited(),
        greets_at=("127.0.0.1", port), files=files,
    )  # fmt: skip
    return NatsServer(f"nats://127.0.0.1:{port}", passwords, spec)


def plan_services(
    up: UpConfig, config: ServiceConfig, nats: NatsServer | None
) -> tuple[ChildSpec, ...]:
    """The services of one host; with ``nats``, each connects to that server as its role's user."""
    names: list[tuple[BusRole, str]] = [("pager", "pager")]
    names += [("decode", f"decode-{index}") for index in range(up.decode_count)]
    names += [("prefill", f"prefill-{index}") for index in range(up.prefill_count)]
    names += [("gateway", "gateway")]
    tail = "" if nats else "-" + secrets.token_hex(3)  # other meshes may share the server
    return tuple(
        _service(role, name + tail, _with_own_metrics(config, index), nats)
        for index, (role, name) in enumerate(names)
    )


def _with_own_metrics(config: ServiceConfig, index: int) -> ServiceConfig:
    """Give service number ``index`` a metrics port of its own: they take consecutive ports, which
    ``check_metrics_ports`` has checked."""
    first = config.telemetry.metrics_port
    if first == 0:
        return config
    return replace(config, telemetry=replace(config.telemetry, metrics_port=first + index))


def _service(role: BusRole, name: str, config: ServiceConfig, nats: NatsServer | None) -> ChildSpec:
    own = replace(config, host=replace(config.host, name=name))
    if nats is not None:
        own = replace(own, bus=nats.bus(own.bus, role))
    command = (
        sys.executable, "-m", "pagemesh.cli", "serve", role, "--parent-pid", str(os.getpid()),
    )  # fmt: skip
    environ = _inherited() | service_environ(own)
    return ChildSpec(name, role, STAGES[role], command, environ, pulse_flag="--pulse-fd")


def _inherited() -> dict[str, str]:
    """Our environment without settings, which each child gets in full from its configuration. The
    variable that says whether cores run compiled stays: it is read before any settings are."""
    return {
        name: value
        for name, value in os.environ.items()
        if name == compiled.VARIABLE or not name.startswith(ENV_PREFIX)
    }
