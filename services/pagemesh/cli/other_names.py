"""What other servers call a setting: who brings such a flag is told what it is here."""

from __future__ import annotations

from collections.abc import Mapping

_SETTINGS: Mapping[str, str] = {
    "--served-model-name": "--model-name",
    "--api-key": "PAGEMESH_API_KEYS",
    "--max-num-seqs": "--sequence-count-max",
    "--max-num-batched-tokens": "--step-tokens-max",
    "--kv-cache-dtype": "--kv-dtype",
    "--block-size": "--page-size",
    "--gpu-memory-utilization": "--pool-bytes",
    "--kv-cache-memory-bytes": "--pool-bytes",
    "-c": "--pool-bytes",
    "--max-model-len": "none: the model's context, or what the pool holds",
    "--enable-prefix-caching": "none: always on",
    "-t": "--threads",
}
_OF_UP: Mapping[str, str] = {**_SETTINGS, "--port": "--http HOST:PORT"}
_BY_COMMAND: Mapping[str, Mapping[str, str]] = {
    "pagemesh up": _OF_UP,
    "pagemesh doctor": _OF_UP,
    "pagemesh serve gateway": {**_SETTINGS, "--port": "--http-port"},
    "pagemesh serve prefill": _SETTINGS,
    "pagemesh serve decode": _SETTINGS,
}


def name_here(command: str, flag: str) -> str | None:
    """What ``command`` (its whole path) has in place of another server's ``flag``. None: nothing
    that is known of."""
    return _BY_COMMAND.get(command, {}).get(flag)
