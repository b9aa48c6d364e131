"""Logit masks, biases and penalties of samples, kept from one step to the next.

A sequence's tokens are counted once, and then one by one as it grows, so the cost of a step depends
on how many distinct tokens the sequence has, not on the context or the vocabulary. Counts are a
pure function of the tokens and are found again by the array that holds them. Where a text does not
continue what was counted (after a preemption, in another process, when its array grew), it is
counted from scratch.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pagemesh.engine.worker.plan import Sample
from pagemesh.kernels.ops import RowEdits, edit_rows, restore_rows
from pagemesh.wire.tokens import U32

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
Key = tuple[int, int, tuple[int, ...], int]
"""Names a text: the id of its array, its address and strides, and the id of its parameters."""
_KEPT_MAX = 1024
"""Texts; one is also dropped when its array is freed."""
_NEW_TOKENS_MAX = 64
"""Tokens that are counted one by one; if there are more, the whole text is counted again."""


def is_edited(sample: Sample) -> bool:
    """Whether a mask, bias or penalty changes its logits."""
    values = sample.sampling
    return sample.allowed is not None or bool(
        values.logit_bias
        or values.presence_penalty
        or values.frequency_penalty
        or values.repetition_penalty != 1.0
        or (values.stop_tokens and sample.generated_count < values.min_tokens)
    )


@contextlib.contextmanager
def edited(logits: F32, rows: I64, samples: Sequence[Sample]) -> Iterator[None]:
    """A context in which mask, bias and penalties are applied, in place, to the ``rows`` (int64
    [samples], distinct) of ``logits``; on exit the rows are restored. Raises ``IndexError`` for a
    token that ``logits`` have no column for."""
    texts = [_take(sample) for sample in samples]
    x, at = torch.from_numpy(logits), torch.from_numpy(np.ascontiguousarray(rows))
    saved = edit_rows(x, at, [text.edits for text in texts])
    try:
        yield
    finally:
        restore_rows(x, saved)
        for text in texts:
            _give_back(text)


class _Text:
    """The edits that follow from a sample's parameters and tokens."""

    def __init__(self, key: Key, array: U32, sample: Sample) -> None:
        values = sample.sampling
        self.key = key
        self.sampling = values  # kept alive, since its id is in the key
        self.array = weakref.ref(array, lambda _: _kept.pop(key, None))
        self.edits = RowEdits(
            masked=values.stop_tokens,
            bias=values.logit_bias,
            repetition=values.repetition_penalty,
            frequency=values.frequency_penalty,
            presence=values.presence_penalty,
        )
        self._repeats = values.repetition_penalty != 1.0
        self._counts = bool(values.frequency_penalty or values.presence_penalty)
        self._ends = self.edits.masked
        self._prompt_count = sample.prompt_count
        self._context_count = 0
        self._drawn: tuple[int, ...] = ()
        """Tokens counted beyond the context; the next sample may or may not continue them."""
        self._count_anew(sample)

    def follow(self, sample: Sample) -> None:
        """Advance to ``sample``, whose context is in the same array."""
        new = self._new_tokens(sample)
        if new is None:
            self._count_anew(sample)
            return
        for token in new:
            if self._repeats:
                self.edits.repeated.add(token)
            if self._counts:
                self.edits.counted.add(token)
        self._is_at(sample)

    def _new_tokens(self, sample: Sample) -> tuple[int, ...] | None:
        """The tokens not counted yet; ``None`` when ``sample`` does not continue the counted ones
        or has too many new ones."""
        start, end = self._context_count, len(sample.context)
        if sample.prompt_count != self._prompt_count or start < self._prompt_count:
            return None
        if not 0 <= end - start <= _NEW_TOKENS_MAX:
            return None
        tail = (*sample.context[start:].tolist(), *sample.drawn)
        count = len(self._drawn)
        return tail[count:] if tail[:count] == self._drawn else None

    def _count_anew(self, sample: Sample) -> None:
        self._prompt_count = sample.prompt_count
        tokens = sample.tokens if self._repeats or self._counts else None
        if tokens is not None and self._repeats:
            self.edits.repeated.count_anew(tokens)
        if tokens is not None and self._counts:
            self.edits.counted.count_anew(tokens[sample.prompt_count :])
        self._is_at(sample)

    def _is_at(self, sample: Sample) -> None:
        self._context_count, self._drawn = len(sample.context), sample.drawn
        ends = sample.generated_count < self.sampling.min_tokens
        self.edits.masks = ends or sample.allowed is not None
        if sample.allowed is not None:
            allowed = sample.allowed.copy()
            if ends:
                allowed[self._ends[self._ends < len(allowed)]] = False
            self.edits.masked = np.flatnonzero(~allowed)


_kept: OrderedDict[Key, _Text] = OrderedDict()
"""Texts that are not in use, the most recently used at the end."""


def _take(sample: Sample) -> _Text:
    """The text of ``sample``, for its use alone until ``_give_back``: samples with the same context
    and parameters each get their own."""
    context = sample.context
    array = context.base if isinstance(context.base, np.ndarray) else context
    key = (id(array), context.ctypes.data, context.strides, id(sample.sampling))
    text = _kept.pop(key, None)
    if text is None or text.array() is not array:
        return _Text(key, array, sample)
    text.follow(sample)
    return text


def _give_back(text: _Text) -> None:
    if text.array() is None:
        return
    _kept[text.key] = text
    _kept.move_to_end(text.key)
    if len(_kept) > _KEPT_MAX:
        _kept.popitem(last=False)
