"""A model from a folder: configuration, weights and the digests that name them.

``LoadedModel.root`` names weights, tokenizer, positions and page layout: workers with equal roots
may read each other's pages.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import msgspec

from pagemesh.engine.checkpoint import (
    CONFIG_NAME,
    Checkpoint,
    Progress,
    changed,
    config_version,
    read_config,
    silent,
    tokenizer_digest,
    weights_digest,
)
from pagemesh.engine.files import remember
from pagemesh.engine.model import DecoderConfig, decoder_config
from pagemesh.engine.prepared import kept_digest, load_prepared
from pagemesh.engine.weights import EMBEDDING, HEAD, DecoderWeights, assemble, recipes
from pagemesh.kernels.layout import KvDtype
from pagemesh.kernels.ops import PageLayout, identity
from pagemesh.kernels.weight_types import AskedType
from pagemesh.runtime.user_paths import ensure_folder
from pagemesh.runtime.version import __version__
from pagemesh.wire.errors import ConfigError
from pagemesh.wire.identity import model_root
from pagemesh.wire.pager_messages import PoolSpec
from pagemesh.wire.pool_format import IN_FILE
from pagemesh.wire.presence import ModelFacts

_CONFIG_VERSION = 6
"""Raise it when the meaning of ``DecoderConfig`` changes, which configurations are refused, or the
form of the file."""


class ModelSizes(Protocol):
    """What is needed of any model's configuration."""

    @property
    def layer_count(self) -> int: ...

    @property
    def vocab_tokens(self) -> int: ...

    @property
    def context_tokens_max(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a worker and its peers need to know about a model, whichever path runs it; ``name`` is
    what clients call it."""

    name: str
    config: ModelSizes
    layout: PageLayout
    root: bytes
    """SHA-256; see ``wire.identity.model_root``."""
    place: str = field(default=IN_FILE, kw_only=True)
    """Where its pools' pages are; see ``wire.pool_format``."""

    @property
    def pool_spec(self) -> PoolSpec:
        """What a pool must be like to hold this model's pages."""
        return PoolSpec(
            layout_digest=self.layout.digest,
            page_size=self.layout.page_size,
            page_bytes=self.layout.page_bytes,
            group=self.layout.group,
            place=self.place,
        )

    def facts(self, *, pool_pages: int, deterministic: bool) -> ModelFacts:
        """What this worker announces. ``pool_pages`` is 0 while no pool is known."""
        return ModelFacts(
            model=self.name,
            model_root=self.root,
            context_tokens_max=self.config.context_tokens_max,
            vocab_tokens=self.config.vocab_tokens,
            page_size=self.layout.page_size,
            pool_pages=pool_pages,
            deterministic=deterministic,
        )


@dataclass(frozen=True, slots=True)
class LoadedModel(ServedModel):
    """A model for our own forward pass."""

    config: DecoderConfig
    weights: DecoderWeights


def load_model(
    folder: Path,
    *,
    name: str,
    page_size: int,
    cache: Path,
    progress: Progress = silent,
    kv_dtype: KvDtype = "float32",
    weight_type: AskedType = "float32",
    deterministic: bool = False,
) -> LoadedModel:
    """The model in ``folder``, computing in float32, its weights mapped and shared with every
    other process of the host that uses the same ``cache`` folder. K and V are kept as ``kv_dtype``,
    matrices as ``weight_type``. ``deterministic`` workers and others get different roots, so they
    do not read each other's pages.

    The first load of a checkpoint writes its prepared weights to ``cache``. Raises
    ``ConfigError``, one sentence, for a folder that is broken or not supported, and
    ``FilesChangedError`` for one that is written to meanwhile.
    """
    ensure_folder(cache, "PAGEMESH_CACHE_DIR")
    described = config_version(folder)
    config = remembered_config(folder, cache)
    layout = page_layout(config, page_size, kv_dtype)
    with Checkpoint(folder, described) as checkpoint:
        config = with_own_head(config, checkpoint)
        stored = weights_digest(checkpoint.paths, config.digest(), cache, progress)
        weights = kept_digest(stored, weight_type)
        tensors = load_prepared(checkpoint, recipes(config), weights, cache, progress, weight_type)
        checkpoint.require_unchanged()
    root = root_of(
        folder, layout, weights=weights, positions=config.rope.canonical(),
        arithmetic=exact_arithmetic() if deterministic else "",
    )  # fmt: skip
    return LoadedModel(name, config, layout, root, assemble(config, tensors, weight_type))


def exact_arithmetic() -> str:
    """Names all that decides the last bits of K and V, for models in whose pages these have to be
    reproducible. Pages outlive workers and may come from a disk, so some may have been written by a
    mesh that is not deterministic, on another processor, or by another version of the kernels."""
    return f"row-invariant {__version__} {identity()}"


def root_of(
    folder: Path, layout: PageLayout, *, weights: bytes, positions: str, arithmetic: str = ""
) -> bytes:
    """``identity.model_root`` of the model in ``folder`` over pages of ``layout``."""
    return model_root(
        weights=weights,
        adapter=b"",
        tokenizer=tokenizer_digest(folder),
        positions=positions,
        kv_dtype=layout.dtype,
        kv_scales=b"",  # scales, if any, are in the page and computed from its content
        layout=layout.digest,
        page_size=layout.page_size,
        arithmetic=arithmetic,
    )


def remembered_config(folder: Path, cache: Path) -> DecoderConfig:
    """The decoder in ``folder``. What ``transformers`` made of its configuration is kept in
    ``cache``, since importing ``transformers`` takes longer than all the rest of a second start.

    Raises ``ConfigError``, and ``FilesChangedError`` when ``transformers`` read another version of
    the file.
    """
    path = folder / CONFIG_NAME
    try:
        content = path.read_bytes()
    except OSError:
        raise ConfigError(f"model {folder}: has no config.json") from None
    made_by = f"{_CONFIG_VERSION} {version('transformers')}\n"
    key = hashlib.sha256(made_by.encode() + content).hexdigest()
    known = cache / f"config-{key[:32]}.json"
    try:
        check, _, kept = known.read_bytes().partition(b"\n")
        if check == _check(kept):  # or one changed digit would give wrong tokens
            return msgspec.json.decode(kept, type=DecoderConfig)
    except (OSError, msgspec.MsgspecError):
        pass  # not known yet, or another pagemesh's
    config = decoder_config(read_config(folder), where=f"model {folder}")
    if not path.is_file() or path.read_bytes() != content:
        raise changed(path)  # else the result would be kept under the wrong content for good
    kept = msgspec.json.encode(config)
    remember(known, _check(kept) + b"\n" + kept)
    return config


def _check(kept: bytes) -> bytes:
    return hashlib.sha256(kept).hexdigest().encode()


def with_own_head(config: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    """``config`` as ``transformers`` reads it for an open ``checkpoint``: a head that is stored
    beside the embeddings is not tied to them, whatever the configuration says. (If it is a copy of
    them, results do not change.) A tied tensor may be stored under the head's name alone."""
    if not config.tied_embeddings or HEAD not in checkpoint:
        return config
    if EMBEDDING in checkpoint:
        return replace(config, tied_embeddings=False)
    checkpoint.share(HEAD, EMBEDDING)
    return config


def page_layout(config: DecoderConfig, page_size: int, kv_dtype: KvDtype = "float32") -> PageLayout:
    """The layout of this model's K and V in a page of ``page_size`` slots. Raises
    ``ConfigError``."""
    try:
        return PageLayout(
            layers=config.layer_count,
            kv_heads=config.kv_head_count,
            head_dim=config.head_dim,
            page_size=page_size,
            dtype=kv_dtype,
        )
    except ValueError as error:
        raise ConfigError(f"no page holds K and V of this model: {error}") from None
