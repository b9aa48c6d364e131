"""One uniform per (seed, choice, position): randomness without a state.

Every worker draws the same token for a position: alone or in a batch, before and after a failover.
The hash is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, 2014), applied once for each input word.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)
_FIRST = np.uint64(0xBF58_476D_1CE4_E5B9)
_SECOND = np.uint64(0x94D0_49BB_1331_11EB)


def _mix(word: U64) -> U64:
    word = word + _GOLDEN
    word = (word ^ (word >> np.uint64(30))) * _FIRST
    word = (word ^ (word >> np.uint64(27))) * _SECOND
    return word ^ (word >> np.uint64(31))


def uniforms(seeds: U64, choices: U64, positions: U64) -> NDArray[np.float64]:
    """float64 [n] in [0, 1), each a multiple of 2**-53."""
    mixed = _mix(_mix(_mix(seeds) ^ choices) ^ positions)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
