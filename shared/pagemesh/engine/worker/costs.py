"""How long a step takes, learnt from the steps that were run. Pure: durations are data.

    us = base + a * drawing rows + b * slots they read + c * prompt tokens + d * pairs

A **pair** is a prompt token and a slot that it attends to. Steps with prompts and steps without
are remembered separately, so that neither kind is forgotten while only the other is run. The fit
is by least squares of relative errors (a step of a millisecond counts as much as one of a second),
and no cost is negative.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Costs = tuple[float, float, float, float, float]
"""Microseconds of each part: the base, a drawing row, a slot, a prompt token, a pair."""
_SCALES = np.array([1.0, 8.0, 8_192.0, 64.0, 65_536.0])
"""Typical sizes of the five parts, so that they weigh alike in the fit."""
_RIDGE = 1e-4
_KEPT_DRAWING, _KEPT_PROMPTS = 0.95, 0.9
"""Each observation multiplies the weight of earlier ones of its kind by this: about the last 20
and 10 count."""
_OUTLIER = 3.0
"""A step that took more than this many times the expected time was held up by something else. It
counts as this many times, so that a machine that did become slower is learnt in a few steps."""
_KNOWN_WEIGHT = 4.0
_PENDING_MAX = 16
"""Observations kept unprocessed until a cost is asked for: processing one takes as long as
sending a token, and a step has to be reported first."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the time of a step depends on."""

    drawing_rows: int = 0
    read_slots: int = 0
    """Slots that drawing rows attend to."""
    prompt_tokens: int = 0
    pairs: float = 0.0

    def __add__(self, other: StepShape) -> StepShape:
        return StepShape(
            self.drawing_rows + other.drawing_rows,
            self.read_slots + other.read_slots,
            self.prompt_tokens + other.prompt_tokens,
            self.pairs + other.pairs,
        )

    @property
    def features(self) -> F64:
        """float64 [5], scaled so that typical values are about 1."""
        parts = (1.0, self.drawing_rows, self.read_slots, self.prompt_tokens, self.pairs)
        scaled: F64 = np.array(parts, np.float64) / _SCALES
        return scaled


def drawing(starts: Iterable[int]) -> StepShape:
    """Rows of one token, one at each position of ``starts``."""
    read = [start + 1 for start in starts]
    return StepShape(drawing_rows=len(read), read_slots=sum(read))


def prompt(start: int, count: int) -> StepShape:
    """A row of ``count`` tokens from position ``start`` on."""
    return StepShape(prompt_tokens=count, pairs=count * (start + (count + 1) / 2))


class _Seen:
    """Weighted sums over the observations of one kind."""

    __slots__ = ("_kept", "products", "sums", "weight")

    def __init__(self, kept: float) -> None:
        self._kept = kept
        self.products: F64 = np.zeros((5, 5))
        self.sums: F64 = np.zeros(5)
        self.weight = 0.0

    def add(self, features: F64, duration_us: float) -> None:
        relative = features / duration_us
        self.products = self.products * self._kept + np.outer(relative, relative)
        self.sums = self.sums * self._kept + relative
        self.weight = self.weight * self._kept + 1.0


class StepCosts:
    """Learns from the steps passed to ``observe`` and predicts the durations of others."""

    def __init__(self) -> None:
        self._drawing = _Seen(_KEPT_DRAWING)
        self._prompts = _Seen(_KEPT_PROMPTS)
        self._pending: list[tuple[StepShape, float]] = []
        self._fitted: Costs = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._is_fitted = True
        """Whether ``_fitted`` takes all processed observations into account."""

    @property
    def knows_prompts(self) -> bool:
        """Whether the cost of prompt tokens has been learnt."""
        return self.prompt_us(0, 1) > 0.0

    def observe(self, shape: StepShape, duration_us: float) -> None:
        """A step of ``shape`` took ``duration_us``; 0 is ignored."""
        if duration_us > 0.0:
            self._pending.append((shape, duration_us))
            if len(self._pending) >= _PENDING_MAX:
                self._take_in()

    def us(self, shape: StepShape) -> float:
        """What a step of ``shape`` would take, in microseconds; 0 before anything is known."""
        return _us(self._costs(), shape)

    def prompt_us(self, start: int, count: int) -> float:
        """What ``count`` prompt tokens from position ``start`` on add to a step."""
        *_, per_token, per_pair = self._costs()
        return per_token * count + per_pair * prompt(start, count).pairs

    def tokens_within(self, spare_us: float, start: int) -> int:
        """How many prompt tokens from position ``start`` on add at most ``spare_us``; only when
        ``knows_prompts``."""
        *_, per_token, per_pair = self._costs()
        if spare_us <= 0.0:
            return 0
        # per_pair / 2 * n^2 + slope * n = spare_us
        slope = per_token + per_pair * (start + 0.5)
        root = math.sqrt(slope * slope + 2.0 * per_pair * spare_us)
        return int(2.0 * spare_us / (slope + root))

    def _take_in(self) -> None:
        pending, self._pending = self._pending, []
        for shape, duration_us in pending:
            seen = self._prompts if shape.prompt_tokens else self._drawing
            # A fit takes time too, so there is a new one only for an outlier by the last one.
            if seen.weight >= _KNOWN_WEIGHT and duration_us > _OUTLIER * _us(self._fitted, shape):
                duration_us = min(duration_us, _OUTLIER * max(_us(self._by_taken(), shape), 1.0))
            seen.add(shape.features, duration_us)
            self._is_fitted = False

    def _costs(self) -> Costs:
        self._take_in()
        return self._by_taken()

    def _by_taken(self) -> Costs:
        if not self._is_fitted:
            base, row, slot, token, pair = (self._solve() / _SCALES).tolist()
            self._fitted, self._is_fitted = (base, row, slot, token, pair), True
        return self._fitted

    def _solve(self) -> F64:
        """Fits both kinds together. While prompts wait, every step has some, so the cost of drawing
        rows must be learnt from these steps too: there may have been few and short rows before."""
        return _fit(
            self._drawing.products + self._prompts.products,
            self._drawing.sums + self._prompts.sums,
        )


def _us(costs: Costs, shape: StepShape) -> float:
    base, per_row, per_slot, per_token, per_pair = costs
    drawing_us = per_row * shape.drawing_rows + per_slot * shape.read_slots
    return base + drawing_us + per_token * shape.prompt_tokens + per_pair * shape.pairs


def _fit(products: F64, sums: F64) -> F64:
    """Non-negative least squares: leaves out variables that would be negative, the worst first."""
    # The ridge scales with the data: relative features shrink as steps grow longer.
    size = len(sums)
    products = products + np.eye(size) * (_RIDGE * float(np.trace(products)) / size)
    fitted: F64 = np.zeros(size)
    part = [index for index in range(size) if sums[index] > 0.0]
    while part:
        found = np.linalg.solve(products[np.ix_(part, part)], sums[part])
        worst = int(found.argmin())
        if found[worst] >= 0.0:
            fitted[part] = found
            break
        del part[worst]
    return fitted
