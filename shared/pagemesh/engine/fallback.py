"""Any decoder of ``transformers`` over our pages: its own modules, our attention.

``transformers`` lets attention be replaced by name. Ours writes K and V of the step's rows to
their pages and attends through the page tables, so prompt chunks, single tokens and cached prefixes
share one code path here too. The rows of all sequences go through the modules as one sequence with
explicit positions; only attention knows which row belongs to which sequence:

    modules(tokens [1, T], positions [1, T], step) -> ... attend(layer, q, k, v, step) ...

The price is the overhead of the modules' Python code, a quarter to half a millisecond per layer and
step, and results whose last bits depend on the batch. Matrix products are ours (``PackedModule``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pagemesh.kernels.batch import WINDOW_TOKENS_MAX
from pagemesh.kernels.linear.packed import unpack_linear
from pagemesh.kernels.ops import (
    KvPool,
    PackedLinear,
    RaggedBatch,
    kv_write,
    linear,
    paged_attention,
)

Tensor = torch.Tensor
ATTENTION = "pagemesh"
"""The name under which ``transformers`` knows our attention."""
_HARMLESS = frozenset(
    {"cache_position", "output_attentions", "output_hidden_states", "position_ids", "use_cache"}
)
"""Arguments that modules pass to attention and that attention may ignore."""

_WORDS = {"s_aux": "sinks (s_aux), which are not there yet"}
"""Arguments of attention as error messages describe them."""


class UnfitModelError(Exception):
    """The modules need something that attention over pages cannot provide; says what."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one layer asks of attention; ``head_dim`` is the width of a head."""

    layer: int
    kv_head_count: int
    head_dim: int
    window_tokens: int
    """``WINDOW_TOKENS_MAX`` if the layer has no window."""


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step as attention sees it; modules pass it on without reading it."""

    batch: RaggedBatch
    pool: KvPool


@dataclass(frozen=True, slots=True)
class Survey:
    """Passed instead of a ``PagedStep``: attention only records what it is asked for."""

    seen: list[Seen]


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    pagemesh: PagedStep | Survey | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """An attention function of ``transformers``. ``query``: float32 [1, heads, T, head_dim],
    ``key`` and ``value``: [1, kv_heads, T, head_dim]; returns [1, T, heads, head_dim].

    Raises ``UnfitModelError`` for anything it cannot honour.
    """
    if pagemesh is None:
        raise UnfitModelError(
            "its code in transformers does not tell its attention which pages to use"
        )
    unknown = sorted(name for name, given in rest.items() if given is not None)
    if unwanted := [_WORDS.get(name, name) for name in unknown if name not in _HARMLESS]:
        raise UnfitModelError(f"its attention takes {', '.join(unwanted)}")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnfitModelError("it attends to what comes later")
    if attention_mask is not None or dropout or getattr(module, "is_cross_attention", False):
        raise UnfitModelError("its attention needs a mask of its own")
    if key.shape != value.shape:
        raise UnfitModelError(
            f"its keys are {key.shape[-1]} wide and its values {value.shape[-1]} (MLA?)"
        )
    window = sliding_window or WINDOW_TOKENS_MAX
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnfitModelError("its layers are not numbered")
    if isinstance(pagemesh, Survey):
        pagemesh.seen.append(Seen(layer, key.shape[1], key.shape[3], window))
        return query.transpose(1, 2).contiguous(), None
    q, k, v = (rows[0].transpose(0, 1).contiguous() for rows in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    width, pool = q.shape[-1], pagemesh.pool
    q, k, v = _fitted(q, k, v, pool)
    kv_write(k, v, pool, layer, pagemesh.batch.slots)
    out = paged_attention(
        q, pool, layer, pagemesh.batch, scale, soft_cap=softcap or math.inf, window_tokens=window
    )
    return out[None, :, :, :width], None


def _fitted(q: Tensor, k: Tensor, v: Tensor, pool: KvPool) -> tuple[Tensor, Tensor, Tensor]:
    """Fit a layer with fewer or narrower heads than the page has room for: KV heads are repeated,
    and all heads are padded with zeros. Neither changes the result of attention."""
    at = pool.layout
    if k.shape[1] < at.kv_heads:
        k, v = (rows.repeat_interleave(at.kv_heads // k.shape[1], 1) for rows in (k, v))
    if (missing := at.head_dim - q.shape[2]) > 0:
        q, k, v = (torch.nn.functional.pad(rows, (0, missing)) for rows in (q, k, v))
    return q, k, v


class PackedModule(torch.nn.Module):
    """Replaces a ``torch.nn.Linear``: the same product, by our kernel."""

    def __init__(self, packed: PackedLinear) -> None:
        """``packed`` may be replaced later by another of the same shape."""
        super().__init__()
        self.packed = packed
        self.in_features, self.out_features = packed.k, packed.n
        bias = packed.bias if packed.has_bias else None
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x.reshape(-1, x.shape[-1]), self.packed).view(*x.shape[:-1], self.packed.n)

    @property
    def weight(self) -> Tensor:
        """A copy, [n, k], for modules that read the weight or compute with it themselves."""
        return unpack_linear(self.packed)


def linears(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    """The modules, by name, that ``PackedModule`` can replace."""
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear:  # a subclass may compute something else
            yield name, module


def register() -> None:
    """Register our attention with ``transformers``; may be called again."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, _no_mask)


def _no_mask(*_arguments: Any, **_named: Any) -> None:
    """No mask is needed: page tables and positions say which tokens a row may attend to."""


class FallbackDecoder:
    """``executor.StepDecoder`` over a causal language model of ``transformers``. One thread at
    a time."""

    def __init__(self, model: Any) -> None:
        """``model``: with our attention set and its weights loaded, float32."""
        self._model = model
        self._name: str = model.base_model_prefix
        self._body: Callable[..., Any] = getattr(model, self._name)

    run = None

    def step(
        self, tokens: Tensor, batch: RaggedBatch, wanted: Tensor, pool: KvPool, *, logits: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See ``engine.forward.Decoder``. Raises ``IndexError`` for a token, position or page
        out of range, ``UnfitModelError``."""
        hidden = self.run_body(tokens, batch.row_position.long(), PagedStep(batch, pool))
        hidden = hidden[wanted]
        return hidden, self.logits(hidden) if logits else None

    def survey(self) -> list[Seen]:
        """What each layer asks of attention, found by running one token through the modules.
        Raises ``UnfitModelError``."""
        seen: list[Seen] = []
        zero = torch.zeros(1, dtype=torch.int64)
        self.run_body(zero, zero, Survey(seen))
        return seen

    def run_body(self, tokens: Tensor, positions: Tensor, step: PagedStep | Survey) -> Tensor:
        """float32 [T, hidden], ready for ``logits``."""
        out = self._body(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, pagemesh=step
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab] of ``hidden`` rows. Some models do more here than one product (a soft
        cap, a factor), so the model's own code runs, on the given hidden states."""
        with self._headless():
            out: Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return out.float().contiguous()

    @contextmanager
    def _headless(self) -> Iterator[None]:
        setattr(self._model, self._name, _Given())
        try:
            yield
        finally:
            setattr(self._model, self._name, self._body)


class _Given(torch.nn.Module):
    """Replaces a model's body: returns the hidden states that it is given."""

    @property
    def decoder(self) -> _Given:
        """OPT's head calls this part of its body, which has no other."""
        return self

    def forward(self, *_ids: None, inputs_embeds: Tensor, **_rest: Any) -> _Output:
        return _Output(inputs_embeds)


class _Output:
    """The output of any body: the last hidden state; every other field is ``None``."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, _name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


def window_obstacle(config: Any, seen: Mapping[int, Seen]) -> str:
    """Where attention was not given the window that the configuration names; empty when they agree.
    A model that applies its window only in its masks would silently attend to too much."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    # Where layers have types, masks follow those, whatever the switch says.
    if not window or (kinds is None and getattr(config, "use_sliding_window", True) is False):
        return ""
    for layer, told in seen.items():
        has_window = kinds is None or kinds[layer] == "sliding_attention"
        if has_window and told.window_tokens != window:
            return f"its layer {layer} does not tell attention its window of {window} tokens"
    return ""
