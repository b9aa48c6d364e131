"""Masks, biases and penalties of samples: what they are is kept from one step to the next.

What a sequence has said is counted once, and then token by token as it grows; a step costs the
different tokens in it, whatever the context and the vocabulary. It is found again by the array
that its tokens are in, and a pure function of them: where a text does not go on with what was
counted (after a preemption, in another process, when its array grew) it is counted anew.
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
"""An array, where in it a text begins and how it lies there, and its parameters."""
_KEPT_MAX = 1024
"""Texts, of those whose arrays are alive."""
_NEW_TOKENS_MAX = 64
"""Counted one by one; more are counted anew with the rest."""


def is_edited(sample: Sample) -> bool:
    """Whether a mask, bias or penalty changes its logits."""
    values = sample.sampling
    return bool(
        values.logit_bias
        or values.presence_penalty
        or values.frequency_penalty
        or values.repetition_penalty != 1.0
        or (values.stop_tokens and sample.generated_count < values.min_tokens)
    )


@contextlib.contextmanager
def edited(logits: F32, rows: I64, samples: Sequence[Sample]) -> Iterator[None]:
    """While it lasts the ``rows`` (int64 [samples], none twice) of ``logits`` are as mask, bias
    and penalties make them; afterwards they are as before. Raises ``IndexError`` for a token
    that ``logits`` have not."""
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
    """What a sample's parameters make of its tokens."""

    def __init__(self, key: Key, array: U32, sample: Sample) -> None:
        values = sample.sampling
        self.key = key
        self.sampling = values  # its id is in the key: nothing else may get that
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
        self._prompt_count = sample.prompt_count
        self._context_count = 0
        self._drawn: tuple[int, ...] = ()
        """Counted beside the context; the next one may or may not go on with them."""
        self._count_anew(sample)

    def follow(self, sample: Sample) -> None:
        """Be that of ``sample``, whose context is in the same array."""
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
        """What comes after what is counted; ``None`` when that is not what came before."""
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
        self.edits.masks = sample.generated_count < self.sampling.min_tokens


_kept: OrderedDict[Key, _Text] = OrderedDict()
"""Those that nobody is using, the one used last at the end."""


def _take(sample: Sample) -> _Text:
    """Nobody else's until it is given back: samples that share a text each have their own."""
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
