"""Flags of other LLM servers and their equivalents here, for the error about an unknown flag."""

from __future__ import annotations

from collections.abc import Mapping

_OF_WORKERS: Mapping[str, str] = {
    "--served-model-name": "--model-name",
    "--max-num-seqs": "--sequence-count-max",
    "--max-num-batched-tokens": "--step-tokens-max",
    "--kv-cache-dtype": "--kv-dtype",
    "--block-size": "--page-size",
    "--max-model-len": "none: the model's context, or what the pool holds",
    "--enable-prefix-caching": "none: always on",
    "--tensor-parallel-size": "none: a model runs on one device",
    "-t": "--threads",
}
_OF_POOLS: Mapping[str, str] = {
    "--gpu-memory-utilization": "--pool-bytes",
    "--kv-cache-memory-bytes": "--pool-bytes",
    "-c": "--pool-bytes",
}
_OF_DOORS: Mapping[str, str] = {
    "--served-model-name": "--model-name",
    "--api-key": "PAGEMESH_API_KEYS",
}
_OF_UP: Mapping[str, str] = {
    **_OF_WORKERS, **_OF_POOLS, **_OF_DOORS, "--port": "--http HOST:PORT",
}  # fmt: skip
BY_COMMAND: Mapping[str, Mapping[str, str]] = {
    "pagemesh up": _OF_UP,
    "pagemesh doctor": _OF_UP,
    "pagemesh serve gateway": {**_OF_DOORS, "--port": "--http-port"},
    "pagemesh serve pager": _OF_POOLS,
    "pagemesh serve prefill": _OF_WORKERS,
    "pagemesh serve decode": _OF_WORKERS,
}


def name_here(command: str, flag: str) -> str | None:
    """The equivalent of another server's ``flag`` for ``command`` (its whole path); None if none is
    known."""
    return BY_COMMAND.get(command, {}).get(flag)
