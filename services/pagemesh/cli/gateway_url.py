"""How commands that talk to a gateway find it: without ``--url`` it is that of the one `pagemesh
up` that runs on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from pagemesh.cli.client_config import ClientConfig
from pagemesh.cli.mesh.run_folder import GATEWAY, running_urls
from pagemesh.cli.options import config_flags, given_flags
from pagemesh.runtime.config import load, options
from pagemesh.runtime.settings import HostConfig
from pagemesh.wire.errors import ConfigError

_POOL_DIR = "PAGEMESH_POOL_DIR"
gateway_flags = config_flags(
    ClientConfig,
    defaults={"PAGEMESH_URL": f"that of `pagemesh up` on this machine, else {ClientConfig().url}"},
)
"""What says where the gateway is, and who asks."""
pool_dir_flag = config_flags(
    HostConfig,
    defaults={"PAGEMESH_POOL_DIR": "where `pagemesh up` has it unless told otherwise"},
    without=[each.variable for each in options(HostConfig) if each.variable != _POOL_DIR],
)
"""What says where a `pagemesh up` of this machine is found."""


def client_config(arguments: Mapping[str, object]) -> ClientConfig:
    """The gateway that flags, environment or a running `pagemesh up` name. Raises
    ``ConfigError``."""
    flags = given_flags(arguments)
    config = load(ClientConfig, os.environ, flags)
    if "PAGEMESH_URL" in flags or "PAGEMESH_URL" in os.environ:
        return config
    urls = sorted(running_urls(load(HostConfig, os.environ, flags).pool_dir, GATEWAY).values())
    if len(urls) > 1:
        raise ConfigError(f"{len(urls)} meshes run here: {', '.join(urls)}; name one with --url")
    return replace(config, url=urls[0]) if urls else config
