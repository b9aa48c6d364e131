"""The engine alone in this process, as the reference for a mesh's tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from pagemesh.engine.forward import Decoder
from pagemesh.engine.loading import load_model
from pagemesh.kernels.layout import KvDtype
from pagemesh.kernels.ops import KvPool, ragged_batch
from pagemesh.kernels.weight_types import AskedType

PAGE_SIZE = 16


class OneProcess:
    """A model over a pool of a mesh's layout, which computes whole contexts at once."""

    def __init__(
        self,
        folder: Path,
        cache: Path,
        *,
        kv_dtype: KvDtype = "float32",
        weight_type: AskedType = "float32",
    ) -> None:
        self._model = load_model(
            folder, name="alone", page_size=PAGE_SIZE, cache=cache, kv_dtype=kv_dtype,
            weight_type=weight_type,
        )  # fmt: skip
        self._decoder = Decoder(self._model.config, self._model.weights, deterministic=True)

    def greedy(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The most likely token after ``prompt`` and each prefix of ``tokens``."""
        context = [*prompt, *tokens[:-1]]
        table = np.arange(-(-len(context) // PAGE_SIZE), dtype=np.uint32)
        pool = KvPool.allocate(self._model.layout, len(table))
        batch = ragged_batch([table], [0], [len(context)], PAGE_SIZE)
        wanted = torch.arange(len(prompt) - 1, len(context))
        with torch.inference_mode():
            hidden = self._decoder.hidden(torch.tensor(context), batch, wanted, pool)
            return tuple(self._decoder.logits(hidden).argmax(-1).tolist())
