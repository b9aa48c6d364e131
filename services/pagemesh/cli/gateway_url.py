"""How commands find the gateway: by ``--url``, else they take that of the only `pagemesh up` on
this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from pagemesh.cli.client_config import ClientConfig
from pagemesh.cli.mesh.run_folder import GATEWAY, running_urls
from pagemesh.cli.options import config_flags, given_flags
from pagemesh.runtime.config import load, options
from pagemesh.runtime.ports import shown_urls
from pagemesh.runtime.settings import HostConfig
from pagemesh.wire.errors import ConfigError

_POOL_DIR = "PAGEMESH_POOL_DIR"
gateway_flags = config_flags(
    ClientConfig,
    defaults={"PAGEMESH_URL": f"that of `pagemesh up` on this machine, else {ClientConfig().url}"},
)
"""The flags that name the gateway and authenticate the caller."""
pool_dir_flag = config_flags(
    HostConfig,
    defaults={"PAGEMESH_POOL_DIR": "as in `pagemesh up`"},
    without=[each.variable for each in options(HostConfig) if each.variable != _POOL_DIR],
)
"""The flag that says where the `pagemesh up` processes of this machine are found."""


def client_config(arguments: Mapping[str, object]) -> ClientConfig:
    """The gateway named by flags, the environment or a running `pagemesh up`. Raises
    ``ConfigError``."""
    flags = given_flags(arguments)
    config = load(ClientConfig, os.environ, flags)
    if "PAGEMESH_URL" in flags or "PAGEMESH_URL" in os.environ:
        return config
    base = load(HostConfig, os.environ, flags).pool_dir
    nats = flags.get("PAGEMESH_NATS", os.environ.get("PAGEMESH_NATS", ""))
    urls = sorted(of_named_mesh(running_urls(base, GATEWAY), base, "operator", nats).values())
    if len(urls) > 1:
        raise ConfigError(f"{len(urls)} meshes run here: {', '.join(urls)}; name one with --url")
    return replace(config, url=urls[0]) if urls else config


def of_named_mesh(files: Mapping[Path, str], base: Path, role: str, url: str) -> Mapping[Path, str]:
    """Those of ``files`` (from ``running_urls``) that belong to the mesh below ``base`` whose URL
    for ``role`` is ``url``: naming one URL of a mesh selects that mesh, possibly one that is not
    running here. All of them if ``url`` is empty."""
    if not url:
        return files
    place = _place(url)
    named = {
        file.parent for file, each in running_urls(base, role).items() if _place(each) == place
    }
    return {file: each for file, each in files.items() if file.parent in named}


def _place(url: str) -> tuple[str, int | None]:
    """Host and port of ``url``, which is what meshes are compared by: `pagemesh up` writes a user
    into its URLs, while people may omit it, append the path that SDKs want, or say ``localhost``.
    Raises ``ConfigError``."""
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        host, port = parts.hostname or "", parts.port
    except ValueError:  # whose text may quote the password
        shown = shown_urls(url)
        raise ConfigError(f"{shown!r} is no URL; give a host and a port up to 65535") from None
    return "127.0.0.1" if host == "localhost" else host, port
