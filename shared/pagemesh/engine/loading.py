"""A model from a folder: configuration, weights and the digests that name them.

LoadedModel.root  names weights, tokenizer, positions and page layout: workers with equal
                  roots may read each other's pages
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pagemesh.engine.checkpoint import (
    Checkpoint,
    Progress,
    read_config,
    silent,
    tokenizer_digest,
    weights_digest,
)
from pagemesh.engine.files import ensure_folder
from pagemesh.engine.model import DecoderConfig, decoder_config
from pagemesh.engine.prepared import load_prepared
from pagemesh.engine.weights import DecoderWeights, assemble, recipes
from pagemesh.kernels.ops import PageLayout
from pagemesh.wire.errors import ConfigError
from pagemesh.wire.identity import model_root
from pagemesh.wire.pager_messages import PoolSpec
from pagemesh.wire.presence import ModelFacts


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything a worker needs of a model; ``name`` is what clients call it."""

    name: str
    config: DecoderConfig
    weights: DecoderWeights
    layout: PageLayout
    root: bytes
    """SHA-256; see ``wire.identity.model_root``."""

    @property
    def pool_spec(self) -> PoolSpec:
        """What a pool must be like to hold this model's pages."""
        return PoolSpec(
            layout_digest=self.layout.digest,
            page_size=self.layout.page_size,
            page_bytes=self.layout.page_bytes,
            group=self.layout.group,
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


def load_model(
    folder: Path, *, name: str, page_size: int, cache: Path, progress: Progress = silent
) -> LoadedModel:
    """The model in ``folder``, float32, its weights mapped and shared with every other
    process of the host that uses the same ``cache`` folder.

    The first load of a checkpoint writes its prepared weights to ``cache``. Raises
    ``ConfigError``, one sentence, for a folder that is broken or not supported.
    """
    config = decoder_config(read_config(folder), where=f"model {folder}")
    layout = page_layout(config, page_size)
    ensure_folder(cache)
    with Checkpoint(folder) as checkpoint:
        weights = weights_digest(checkpoint.paths, config.digest(), cache, progress)
        tensors = load_prepared(checkpoint, recipes(config), weights, cache, progress)
    root = model_root(
        weights=weights,
        adapter=b"",
        tokenizer=tokenizer_digest(folder),
        positions=config.rope.canonical(),
        kv_dtype=layout.dtype,
        kv_scales=b"",
        layout=layout.digest,
        page_size=page_size,
    )
    return LoadedModel(name, config, assemble(config, tensors), layout, root)


def page_layout(config: DecoderConfig, page_size: int) -> PageLayout:
    """How this model's K and V lie in a page of ``page_size`` slots. Raises ``ConfigError``."""
    try:
        return PageLayout(
            layers=config.layer_count,
            kv_heads=config.kv_head_count,
            head_dim=config.head_dim,
            page_size=page_size,
        )
    except ValueError as error:
        raise ConfigError(f"no page holds K and V of this model: {error}") from None
