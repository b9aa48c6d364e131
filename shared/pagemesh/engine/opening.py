"""A model ready to run, by whichever path runs it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from pagemesh.engine.checkpoint import Progress, silent
from pagemesh.engine.coverage import path_of
from pagemesh.engine.executor import StepDecoder
from pagemesh.engine.forward import Decoder
from pagemesh.engine.loading import ServedModel, load_model
from pagemesh.kernels.layout import KvDtype
from pagemesh.kernels.weight_types import WeightType
from pagemesh.runtime.model_folder import read_config
from pagemesh.wire.errors import ConfigError


def open_model(
    folder: Path,
    *,
    name: str,
    page_size: int,
    cache: Path,
    deterministic: bool,
    progress: Progress = silent,
    kv_dtype: KvDtype = "float32",
    weight_type: WeightType = "float32",
) -> tuple[ServedModel, StepDecoder]:
    """The model in ``folder`` on the CPU. Raises ``ConfigError``, one sentence, for a folder
    that is broken or a model that cannot run so."""
    where = f"model {folder}"
    fields = SimpleNamespace(**read_config(folder / "config.json"))
    try:
        path = path_of(fields, where)
    except (TypeError, LookupError):
        raise ConfigError(f"{where}: config.json holds values of the wrong kind") from None
    if path == "lean":
        loaded = load_model(
            folder, name=name, page_size=page_size, cache=cache, progress=progress,
            kv_dtype=kv_dtype, weight_type=weight_type, deterministic=deterministic,
        )  # fmt: skip
        return loaded, Decoder(loaded.config, loaded.weights, deterministic=deterministic)
    if deterministic:
        raise ConfigError(
            f"PAGEMESH_DETERMINISTIC (--deterministic): {where} runs on the modules of "
            "transformers, whose last bits depend on the batch; leave it out"
        )
    # Imports transformers, which lean models need only at their first start.
    from pagemesh.engine.fallback_loading import load_fallback

    return load_fallback(
        folder, name=name, page_size=page_size, cache=cache, progress=progress, kv_dtype=kv_dtype,
        weight_type=weight_type,
    )  # fmt: skip
