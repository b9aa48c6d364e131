"""``pagemesh plan``: how much KV memory a model takes, and what fits where."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from pagemesh.cli.options import check_variables
from pagemesh.cli.param_types import Counts, Number, Size, Whole
from pagemesh.cli.planning.assemble import TYPE_ASSUMED, Asked, make_plan
from pagemesh.cli.planning.formats import FORMATS, find_format
from pagemesh.cli.planning.lifetime import Pace
from pagemesh.cli.planning.memory import DEVICE_COUNT_MAX
from pagemesh.cli.planning.report import json_report, text_report
from pagemesh.cli.planning.shape import read_shape
from pagemesh.cli.planning.weights import DTYPE_BYTES, Weights, counted_type, weights_of
from pagemesh.engine.coverage import is_tested, refuse_form
from pagemesh.engine.worker.settings import WorkerLimits
from pagemesh.kernels.weight_types import ASKED_TYPES
from pagemesh.runtime.config import load
from pagemesh.runtime.model_folder import find_model, read_config
from pagemesh.runtime.model_types import page_type, told_type
from pagemesh.runtime.settings import PagerConfig, WorkerConfig
from pagemesh.runtime.user_paths import expanded, naming
from pagemesh.wire.errors import ConfigError, shown_name

_SIZE, _TOKENS = Size(), Whole(1, 1 << 31)
_SPEED = Whole(1, 1 << 31)
_LENGTHS = Counts(1, 1 << 24, "token counts such as 800,2300,3900")


@click.command()
@click.argument("model", required=False, default="")
@click.option("--memory", type=_SIZE, help="Memory of one device, such as 24GB or 80GiB.")
@click.option("--share", type=Number(0.0, 1.0, min_open=True), default=0.9,
              show_default=True, help="Share of --memory for weights and KV.")  # fmt: skip
@click.option("--pool-bytes", type=_SIZE, help="KV memory of all devices; excludes --memory.  "
              "[default: the pool of `pagemesh up`]")  # fmt: skip
@click.option("--tensor-parallel", type=Whole(1, DEVICE_COUNT_MAX), default=1,
              show_default=True, help="Devices that split each layer.")  # fmt: skip
@click.option("--kv-dtype", metavar="TYPE", default=None,
              help=f"Type of K and V: {', '.join(FORMATS)}.  [default: the checkpoint's; without "
              "MODEL, that of `pagemesh up`]")  # fmt: skip
@click.option("--dtype", type=click.Choice(list(DTYPE_BYTES)), default=None,
              help="Type of the weights, counted as on a GPU if PAGEMESH_DEVICE is cuda or there "
              "are several devices, else as on a CPU.  [default: the checkpoint's]")  # fmt: skip
@click.option("--weights", type=_SIZE, help="Size of the weights.  [default: from the model]")
@click.option("--page-size", type=Whole(1, 256),
              help="Tokens per page.  [default: as in `pagemesh up`]")  # fmt: skip
@click.option("--session-tokens", type=_TOKENS,
              help="Tokens per session.  [default: several lengths up to the context]")  # fmt: skip
@click.option("--shared-tokens", type=Whole(0, 1 << 31), default=0,
              help="Tokens that all sessions start with.")  # fmt: skip
@click.option("--lengths", type=_LENGTHS, default=(), help="Sequence lengths to show the waste of.")
@click.option("--reserve-tokens", type=_TOKENS,
              help="Tokens reserved by contiguous allocation.  [default: the context]")  # fmt: skip
@click.option("--answer-tokens", type=Whole(0, 1 << 24), default=256, show_default=True,
              help="Tokens at the end of a sequence that are its answer.")  # fmt: skip
@click.option("--prompt-speed", type=_SPEED, default=5_000, show_default=True,
              help="Prefill speed of a prompt, in tokens per second.")  # fmt: skip
@click.option("--answer-speed", type=_SPEED, default=33, show_default=True,
              help="Decode speed of an answer, in tokens per second.")  # fmt: skip
@click.option("--host-memory", type=_SIZE, default=0, help="Size of the host tier.")
@click.option("--disk", type=_SIZE, default=0, help="Size of the disk tier.")
@click.option("--json", "as_json", is_flag=True, help="Print every number as JSON.")
def plan(model: str, as_json: bool, **options: Any) -> int:
    """Show how much KV memory MODEL needs and what fits.

    MODEL is a Hugging Face folder or a config.json (/dev/stdin for a pipe); the default is the
    bundled demo model.
    """
    check_variables()
    asked = ask(model, **options)
    made = make_plan(asked)
    click.echo(json.dumps(json_report(made), indent=2) if as_json else text_report(made))
    return 0


def ask(
    model: str,
    *,
    memory: int | None,
    pool_bytes: int | None,
    kv_dtype: str | None,
    dtype: str | None,
    weights: int | None,
    **rest: Any,
) -> Asked:
    """The request that the flags and the model's files make up. Raises ``ConfigError``."""
    if memory is not None and pool_bytes is not None:
        raise ConfigError("--memory and --pool-bytes exclude each other; give one of them")
    name, path = _config_path(model)
    config = read_config(path)
    where = f"model {path}"
    shape = read_shape(config, where)
    told = shape.dtype or told_type(path.parent)
    shape = replace(shape, dtype=told or TYPE_ASSUMED)
    worker = load(WorkerConfig, os.environ)
    up_kv = page_type(worker, shape.stored)
    stored = counted_type(shape.dtype)
    on_cpu = worker.device == "cpu" and rest["tensor_parallel"] == 1
    return Asked(
        name=name,
        shape=shape,
        kv=find_format(kv_dtype or (stored if model else up_kv), "--kv-dtype"),
        weights=Weights(weights, "as given")
        if weights is not None
        else weights_of(path.parent, config, shape, dtype or stored, on_cpu=on_cpu),
        memory_bytes=memory,
        pool_bytes=load(PagerConfig, os.environ).pool_bytes if pool_bytes is None else pool_bytes,
        page_size=rest["page_size"] or worker.page_size,
        device_count=rest["tensor_parallel"],
        share=rest["share"],
        session_tokens=rest["session_tokens"],
        shared_tokens=rest["shared_tokens"],
        lengths=rest["lengths"],
        reserve_tokens=rest["reserve_tokens"],
        host_bytes=rest["host_memory"],
        disk_bytes=rest["disk"],
        pace=_pace(worker, **rest),
        up_kv=up_kv,
        up_says="; ".join(filter(None, (_up_says(config), _type_says(dtype, on_cpu)))),
        is_type_told=told is not None,
    )


def _type_says(dtype: str | None, on_cpu: bool) -> str:
    """A note if `pagemesh up` does not keep weights in the requested type; empty otherwise."""
    if dtype is None or not on_cpu or dtype in ASKED_TYPES:
        return ""
    return f"`pagemesh up` keeps no weights as {dtype} on a CPU, but as {', '.join(ASKED_TYPES)}"


def _up_says(config: dict[str, Any]) -> str:
    """A note if `pagemesh up` refuses the model, or is not tested with it; empty otherwise. Whether
    an untested one runs is for `transformers` to say, which takes seconds to import."""
    try:
        architecture = refuse_form(SimpleNamespace(**config), "it")
    except ConfigError as error:
        return f"`pagemesh up` does not run {error}"
    except (TypeError, LookupError):
        return "`pagemesh up` does not run it: config.json holds values of the wrong kind"
    if is_tested(architecture):
        return ""
    name = shown_name(architecture)
    return f"{name} is none that pagemesh is tested with: `pagemesh up` says if it runs"


def _pace(
    worker: WorkerConfig, *, answer_tokens: int, prompt_speed: int, answer_speed: int, **_: Any
) -> Pace:
    """How fast sequences advance; chunks and pages ahead of need are those of the workers here."""
    limits = WorkerLimits()
    return Pace(
        answer_tokens=answer_tokens,
        prompt_tokens_s=prompt_speed,
        answer_tokens_s=answer_speed,
        chunk_tokens=worker.step_tokens_max,
        prompt_chunks=limits.prompt_chunks,
        growth_pages=limits.growth_pages,
    )


def _config_path(model: str) -> tuple[str, Path]:
    """The model's name, and the path of its config.json. Raises ``ConfigError``."""
    named = f"model {model}"
    path = expanded(model, named)
    with naming(named):
        if model and path.exists() and not path.is_dir():  # a pipe too: curl ... | plan /dev/stdin
            return (path.resolve().parent.name if path.name == "config.json" else path.stem), path
        if model and not path.exists():
            raise ConfigError(f"{named}: no such folder or file; download its config.json first")
    found = find_model(model)
    return found.name, found.path / "config.json"
