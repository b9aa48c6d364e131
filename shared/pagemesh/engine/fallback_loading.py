"""Loads a model for ``engine.fallback``: modules, mapped weights, and a proof that it works.

``transformers`` reads and converts a checkpoint once; what its modules then hold is written to
a prepared file that every process of the host maps, like the lean path's.

No list could say which architectures compute correctly over pages. So each model is tried when it
is loaded: one token run through its modules shows what each layer asks of attention, and a short
prompt, run in chunks over pages, must give the same logits as ``transformers`` itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagemesh.engine.checkpoint import (
    CONFIG_NAME,
    Checkpoint,
    Progress,
    changed,
    config_version,
    read_config,
    silent,
    weights_digest,
)
from pagemesh.engine.coverage import WHAT_RUNS, refuse_unsupported
from pagemesh.engine.fallback import (
    ATTENTION,
    FallbackDecoder,
    PackedModule,
    PagedStep,
    Seen,
    UnfitModelError,
    linears,
    register,
    window_obstacle,
)
from pagemesh.engine.loading import ServedModel, root_of
from pagemesh.engine.model import context_tokens_of, not_its_own
from pagemesh.engine.prepared import (
    check_room,
    kept_digest,
    kept_type,
    load_or_write,
    prepared_name,
)
from pagemesh.kernels.layout import KvDtype
from pagemesh.kernels.ops import KvPool, PackedLinear, PageLayout, pack_linear, ragged_batch
from pagemesh.kernels.weight_types import AskedType, rounds_rows
from pagemesh.runtime.user_paths import ensure_folder
from pagemesh.wire.errors import ConfigError, first_line

_VERSION = 1
"""Raise it when a change here makes the same modules compute something else."""
_PANELS = "panels"
"""The name of a matrix's packed weight, in place of ``weight``."""
_PROOF_CHUNKS = (9, 1, 1, 8)
_PROOF_GAP_MAX = 1e-3
"""Relative to the largest magnitude among the logits: ten times the difference that another order
of summation makes."""


@dataclass(frozen=True, slots=True)
class FallbackConfig:
    """``loading.ModelSizes`` of a fallback model; ``transformers`` knows the rest of it."""

    layer_count: int
    vocab_tokens: int
    context_tokens_max: int


def load_fallback(
    folder: Path,
    *,
    name: str,
    page_size: int,
    cache: Path,
    progress: Progress = silent,
    kv_dtype: KvDtype = "float32",
    weight_type: AskedType = "float32",
) -> tuple[ServedModel, FallbackDecoder]:
    """The model in ``folder``, computing in float32, its weights mapped as by
    ``loading.load_model``. It is proven with float32 K and V and without rounding the rows that
    matrices multiply, then runs with ``kv_dtype`` and ``weight_type``. The latter is the type of
    the matrices whose modules ``PackedModule`` replaces.

    Raises ``ConfigError``, one sentence, for a broken folder and for a model whose logits over
    pages differ from those without.
    """
    ensure_folder(cache, "PAGEMESH_CACHE_DIR")
    where = f"model {folder}"
    described = config_version(folder)
    source = read_config(folder)
    # config.json was checked as written, but transformers may interpret it differently.
    refuse_unsupported(source, where)
    with Checkpoint(folder, described) as checkpoint:
        checkpoint.refuse_codes()
        stored = weights_digest(checkpoint.paths, _config_digest(folder), cache, progress)
        checkpoint.require_unchanged()
    weights = kept_digest(stored, weight_type)
    model = _modules(checkpoint, source, weights, cache, progress, weight_type)
    try:
        decoder = FallbackDecoder(model)
        with torch.inference_mode():
            layout = _layout(source, decoder.survey(), page_size)
            _prove(model, decoder, layout, source.vocab_size, where)
        if rounds_rows(weight_type):
            _round_rows(model)
        config = _sizes(source, layout)
    except ConfigError:
        raise
    except Exception as error:  # the architecture's own code ran there
        raise ConfigError(_unfit(where, source.architectures[0], error)) from None
    layout = replace(layout, dtype=kv_dtype)
    positions = json.dumps({"transformers": version("transformers")})
    root = root_of(folder, layout, weights=weights, positions=positions)
    return ServedModel(name, config, layout, root), decoder


def _unfit(where: str, architecture: str, error: Exception) -> str:
    """The error message for a model that could not be proven."""
    reason = first_line(error)
    if not isinstance(error, UnfitModelError):
        reason = f"its code in transformers fails there ({type(error).__name__}: {reason})"
    return f"{where}: architecture {architecture} does not run over pages: {reason}; {WHAT_RUNS}"


def _sizes(source: Any, layout: PageLayout) -> FallbackConfig:
    """Raises ``UnfitModelError``."""
    context_tokens_max = context_tokens_of(source)
    if context_tokens_max < 1:
        raise UnfitModelError(f"its max_position_embeddings is {context_tokens_max}")
    return FallbackConfig(
        layer_count=layout.layers,
        vocab_tokens=source.vocab_size,
        context_tokens_max=context_tokens_max,
    )


def _config_digest(folder: Path) -> bytes:
    """Raises ``FilesChangedError`` when the configuration has been removed meanwhile."""
    made_by = f"fallback {_VERSION} {version('transformers')}\n".encode()
    path = folder / CONFIG_NAME
    try:
        return hashlib.sha256(made_by + path.read_bytes()).digest()
    except FileNotFoundError:
        raise changed(path) from None


def _modules(
    checkpoint: Checkpoint,
    source: Any,
    digest: bytes,
    cache: Path,
    progress: Progress,
    weight_type: AskedType,
) -> Any:
    """The modules with mapped weights and our attention. Raises ``ConfigError``, and
    ``FilesChangedError`` when the weights that were read are not those of ``digest``."""
    import transformers
    from transformers.initialization import no_init_weights
    from transformers.utils import logging

    logging.disable_progress_bar()
    register()
    kind = getattr(transformers, source.architectures[0])
    if not isinstance(source, kind.config_class):
        why = f"its model_type is {source.model_type!r}"
        raise not_its_own(f"model {checkpoint.folder}", source.architectures[0], why)

    def write(path: Path) -> None:
        _write_modules(kind, checkpoint.folder, source, path, progress, weight_type)
        checkpoint.require_unchanged()

    tensors = load_or_write(prepared_name(digest, weight_type, "modules-"), cache, write)
    with no_init_weights():  # initial values would be replaced at once
        model = kind(source).eval()
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    # Again, because tie_weights pads a tied head's bias, and so replaces it by an unmapped copy.
    model.load_state_dict(_under_all_names(model, tensors), strict=False, assign=True)
    model.requires_grad_(False)
    _pack(model, tensors)
    mapped = {tensor.data_ptr() for tensor in tensors.values()}
    for own, tensor in model.named_parameters():
        if tensor.data_ptr() not in mapped:
            raise ConfigError(f"model {checkpoint.folder}: nothing gives {own} its values")
    model.set_attn_implementation(ATTENTION)
    return model


def _under_all_names(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``tensors``, which has each tensor once, with the other names of tied parameters added:
    assigning to only one name would untie it from the others."""
    found = dict(tensors)
    names: dict[int, list[str]] = {}
    for name, own in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(own), []).append(name)
    for group in names.values():
        if (known := next((name for name in group if name in tensors), None)) is not None:
            found.update(dict.fromkeys(group, tensors[known]))
    return found


def _pack(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace the modules whose panels are in ``tensors`` by our matrix product. The bias is taken
    from the module: one that several modules share is in ``tensors`` under only one name."""
    no_bias = torch.empty(0)
    for own, module in list(linears(model)):
        if (panels := tensors.get(f"{own}.{_PANELS}")) is not None:
            bias = no_bias if module.bias is None else module.bias.detach()
            packed = PackedLinear(module.out_features, module.in_features, panels, bias)
            model.set_submodule(own, PackedModule(packed))


def _round_rows(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, PackedModule):
            module.packed = replace(module.packed, rounds_rows=True)


def _write_modules(
    kind: Any,
    folder: Path,
    source: Any,
    path: Path,
    progress: Progress,
    weight_type: AskedType,
) -> None:
    """Write each tensor once, however many names it has: the modules know which are tied."""
    from safetensors.torch import save_file

    stored_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    progress("prepare", 0, stored_bytes)
    try:
        model, report = kind.from_pretrained(
            str(folder), config=source, dtype=torch.float32, local_files_only=True,
            use_safetensors=True, output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
        )  # fmt: skip
    except Exception as error:  # transformers raises many types
        raise ConfigError(
            f"model {folder}: transformers cannot load it: {first_line(error)}"
        ) from None
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(f"model {folder}: tensor {missing[0]} is missing")
    for name, stored, wanted in sorted(report["mismatched_keys"]):
        raise ConfigError(
            f"model {folder}: tensor {name} has shape {list(stored)}, config.json wants "
            f"{list(wanted)}"
        )
    tensors: dict[str, torch.Tensor] = {}
    packed: set[str] = set()
    for name, module in linears(model):
        own = kept_type([module.weight], weight_type)
        tensors[f"{name}.{_PANELS}"] = pack_linear(module.weight, weight_type=own).panels
        packed.add(f"{name}.weight")
    known: set[int] = set()
    for name, tensor in model.state_dict().items():
        if name not in packed and tensor.numel() and tensor.data_ptr() not in known:
            known.add(tensor.data_ptr())
            tensors[name] = tensor.contiguous()
    check_room(path.parent, sum(tensor.nbytes for tensor in tensors.values()))
    save_file(tensors, path)
    progress("prepare", stored_bytes, stored_bytes)


def _layout(source: Any, seen: list[Seen], page_size: int) -> PageLayout:
    """The layout of pages with room for the widest layer. Raises ``UnfitModelError``."""
    by_layer = {each.layer: each for each in seen}
    if not seen:
        raise UnfitModelError("none of its layers has attention that can be replaced")
    if len(by_layer) != len(seen) or max(by_layer) != len(seen) - 1:
        raise UnfitModelError("only some of its layers have attention, or one has it twice")
    if obstacle := window_obstacle(source, by_layer):
        raise UnfitModelError(obstacle)
    kv_heads = max(each.kv_head_count for each in seen)
    if any(kv_heads % each.kv_head_count for each in seen):
        raise UnfitModelError("its layers have numbers of KV heads that do not divide each other")
    head_dim = max(each.head_dim for each in seen)
    return PageLayout(layers=len(seen), kv_heads=kv_heads, head_dim=head_dim, page_size=page_size)


def _prove(
    model: Any, decoder: FallbackDecoder, layout: PageLayout, vocab_tokens: int, where: str
) -> None:
    """Raises ``UnfitModelError`` when logits over pages differ from those of the modules alone, and
    ``ConfigError`` when the latter are not finite."""
    count = sum(_PROOF_CHUNKS)
    tokens = torch.arange(1, count + 1) * 7_919 % vocab_tokens
    model.set_attn_implementation("eager")
    try:
        wanted = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(ATTENTION)
    if not wanted.isfinite().all():
        raise ConfigError(
            f"{where}: its logits are no numbers, without pages too: its weights are broken"
        )
    if wanted.shape[1] != vocab_tokens:
        raise UnfitModelError(f"it has {wanted.shape[1]} logits for {vocab_tokens} tokens")
    pool = KvPool.allocate(layout, -(-count // layout.page_size))
    table = np.arange(pool.page_count, dtype=np.uint32)[::-1].copy()
    parts, start = [], 0
    for size in _PROOF_CHUNKS:
        batch = ragged_batch([table], [start], [size], layout.page_size)
        own = tokens[start : start + size]
        hidden = decoder.run_body(own, batch.row_position.long(), PagedStep(batch, pool))
        parts.append(decoder.logits(hidden))
        start += size
    gap = float((torch.cat(parts) - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
    if not gap <= _PROOF_GAP_MAX:
        raise UnfitModelError(
            f"its logits differ by {gap:.1e} of the widest from those without pages"
        )
