"""What is guessed to come next (``kernels/native/drafts.h``), and how much of it is worth a row."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

MATCH_MIN, MATCH_MAX = 3, 16
LONG = 8
EACH_MAX = 7


class Match(NamedTuple):
    end: int
    length: int


class Probe:
    """``drafts.h`` by itself."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("probe_match", "probe_wanted"):
            getattr(library, name).restype = ctypes.c_long
        for name in ("probe_first_chance", "probe_learn"):
            getattr(library, name).restype = ctypes.c_float

    def match(self, history: list[int]) -> Match:
        tokens = np.array(history, np.uint32)
        length = ctypes.c_long()
        end = self._library.probe_match(
            ctypes.c_void_p(tokens.ctypes.data), ctypes.c_long(len(history)), ctypes.byref(length)
        )
        return Match(end, length.value)

    def draft(self, history: list[int], wanted: int) -> list[int]:
        tokens, to = np.array(history, np.uint32), np.zeros(wanted, np.int64)
        self._library.probe_draft(
            ctypes.c_void_p(tokens.ctypes.data), ctypes.c_long(len(history)),
            ctypes.c_long(wanted), ctypes.c_void_p(to.ctypes.data),
        )  # fmt: skip
        return to.tolist()

    def wanted(self, chance: float, sequences: int, each_max: int = EACH_MAX) -> int:
        return int(
            self._library.probe_wanted(
                ctypes.c_float(chance), ctypes.c_long(sequences), ctypes.c_long(each_max)
            )
        )

    def first_chance(self, length: int) -> float:
        return float(self._library.probe_first_chance(ctypes.c_long(length)))

    def learn(self, chance: float, right: int, *, ends: bool) -> float:
        return float(
            self._library.probe_learn(
                ctypes.c_float(chance), ctypes.c_long(right), ctypes.c_bool(ends)
            )
        )


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    source = Path(__file__).with_name("drafts_probe.cpp")
    headers = Path(__file__).parents[2] / "kernels" / "native"
    target = tmp_path_factory.mktemp("probe") / "probe.so"
    flags = ["-std=c++17", "-O3", "-shared", "-fPIC", f"-I{headers}"]
    command = [compiler, *flags, str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Probe(ctypes.CDLL(str(target)))


def longest_match(history: list[int]) -> Match:
    """By definition."""
    found = Match(0, 0)
    for end in range(MATCH_MIN, len(history)):
        length = 0
        while length < min(end, MATCH_MAX) and history[end - 1 - length] == history[-1 - length]:
            length += 1
        if length >= max(MATCH_MIN, found.length):
            found = Match(end, length)
    return found


@pytest.mark.parametrize("token_count", [1, 2, 3, 10, 1_000])
def test_what_is_found_is_the_latest_of_the_longest_matches(probe: Probe, token_count: int) -> None:
    dice = np.random.default_rng(token_count)
    for length in [*range(70), *dice.integers(70, 300, 60).tolist()]:
        history = dice.integers(0, token_count, length).tolist()
        assert probe.match(history) == longest_match(history), history
        if length < 20:
            continue
        copied = int(dice.integers(1, 18))
        start = int(dice.integers(0, length - copied))
        history += history[start : start + copied]
        assert probe.match(history) == longest_match(history), history


@pytest.mark.parametrize("between", [0, 1, 30, 31, 32, 33, 63, 64, 65, 200])
@pytest.mark.parametrize("length", range(1, MATCH_MAX + 4))
def test_a_match_is_found_however_far_back_it_is(probe: Probe, length: int, between: int) -> None:
    said = list(range(1, length + 1))
    for before in (0, 1, 31, 32):
        history = [*[0] * before, *said, *range(100, 100 + between), *said]
        expected = (
            Match(before + length, min(length, MATCH_MAX)) if length >= MATCH_MIN else Match(0, 0)
        )
        assert probe.match(history) == expected


@pytest.mark.parametrize("length", range(MATCH_MIN, MATCH_MAX + 1))
def test_a_longer_match_counts_more_than_a_later_one(probe: Probe, length: int) -> None:
    said = list(range(1, length + 1))
    history = [*said, 50, *[60] * 40, *said[1:], 51, *said]
    assert probe.match(history) == Match(length, length)


def test_what_repeats_goes_on_repeating(probe: Probe) -> None:
    assert probe.draft([7, 1, 2, 1, 2, 1], 5) == [2, 1, 2, 1, 2]
    assert probe.draft([5, 5, 5, 5], 3) == [5, 5, 5]
    assert probe.draft([1, 2, 3, 8, 9, 1, 2, 3], 7) == [8, 9, 1, 2, 3, 8, 9]


def test_a_row_is_worth_its_cost_while_all_guesses_so_far_are_likelier_right(probe: Probe) -> None:
    for sequences in (1, 2, 8, 24):
        cost = sequences / (sequences + 4)
        for chance in np.linspace(0.01, 0.999, 300):
            worth = [count for count in range(1, EACH_MAX + 1) if chance**count >= cost]
            assert probe.wanted(chance, sequences) == len(worth), (chance, sequences)
    assert probe.wanted(0.99, 1, each_max=3) == 3
    assert probe.wanted(0.5, 4) == 1, "what breaks even is tried: something may be learnt"
    assert probe.wanted(1.0, 1, each_max=0) == 0


def test_more_is_thought_of_a_long_match_than_of_a_short_one(probe: Probe) -> None:
    short, long = probe.first_chance(LONG - 1), probe.first_chance(LONG)
    assert [probe.wanted(short, sequences) for sequences in (1, 2, 3)] == [1, 1, 0]
    assert [probe.wanted(long, sequences) for sequences in (1, 8, 32)] == [EACH_MAX, 3, 1]


def test_every_guess_weighs_an_eighth_of_what_is_known(probe: Probe) -> None:
    assert probe.learn(0.4, 0, ends=False) == pytest.approx(0.4)
    assert probe.learn(0.4, 0, ends=True) == pytest.approx(0.35)
    assert probe.learn(0.4, 1, ends=False) == pytest.approx(0.475)
    assert probe.learn(0.4, 3, ends=True) == pytest.approx((1 - 0.6 * (7 / 8) ** 3) * 7 / 8)
