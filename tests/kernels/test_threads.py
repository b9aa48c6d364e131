"""Regions of threads, and how their threads wait for each other (``kernels/native/parallel.h``)."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ENTRIES = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_get_num_procs")
MEET_S_MAX = 60.0
SLICE_US, HOLD_US, HOLD_US_MAX = 1_000.0, 50_000.0, 1_600_000.0
NATIVE = Path(__file__).parents[2] / "kernels" / "native"
SOURCES = (
    Path(__file__).with_name("threads_probe.cpp"),
    NATIVE / "parallel.cpp",
    NATIVE / "gathering.cpp",
)


def compiled(folder: Path, *flags: str) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    target = folder / "threads.so"
    command = [compiler, "-std=c++17", "-O2", "-g", "-shared", "-fPIC", *flags]
    done = subprocess.run(
        [*command, *map(str, SOURCES), "-o", str(target)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = ctypes.CDLL(str(compiled(tmp_path_factory.mktemp("threads"), "-fopenmp")))
    runtime = ctypes.CDLL("libgomp.so.1")
    library.pm_lend_threads(
        *(ctypes.cast(getattr(runtime, name), ctypes.c_void_p) for name in ENTRIES)
    )
    library.gathering_strays.restype = ctypes.c_long
    return library


def met(compute: Callable[[], object]) -> None:
    """Have ``compute`` done by a thread: who is never woken hears no signal of a test's end."""
    computing = threading.Thread(target=compute, daemon=True)
    computing.start()
    computing.join(MEET_S_MAX)
    assert not computing.is_alive(), "somebody waits who was not woken"


class Patience:
    """Of threads that may use so many cores."""

    def __init__(self, library: ctypes.CDLL, cores: int) -> None:
        self._library = library
        for name in ("patience_look_us", "patience_long_us", "patience_brief_us"):
            getattr(library, name).restype = ctypes.c_double
        library.patience_new.restype = ctypes.c_void_p
        self.long_us, self.brief_us = library.patience_long_us(), library.patience_brief_us()
        self._at = ctypes.c_void_p(library.patience_new(ctypes.c_int(cores)))

    def look_us(self, now_us: float, thread_count: int = 2) -> float:
        at_us = ctypes.c_double(now_us)
        return float(self._library.patience_look_us(self._at, ctypes.c_int(thread_count), at_us))

    def lost(self, lost_us: float, times: int, now_us: float) -> None:
        self._library.patience_lost(
            self._at, ctypes.c_double(lost_us), ctypes.c_long(times), ctypes.c_double(now_us)
        )

    def close(self) -> None:
        self._library.patience_delete(self._at)


@pytest.fixture
def patience(threads: ctypes.CDLL) -> Iterator[Patience]:
    made = Patience(threads, cores=2)
    yield made
    made.close()


def test_threads_look_out_for_about_as_long_as_being_woken_takes(patience: Patience) -> None:
    assert patience.look_us(0.0) == patience.long_us
    assert 30.0 <= patience.long_us <= 100.0
    assert patience.brief_us < patience.long_us


def test_who_lost_a_slice_looks_out_briefly_for_a_while(patience: Patience) -> None:
    patience.lost(3_000.0, 1, 7_000.0)
    assert patience.look_us(7_000.0) == patience.brief_us
    assert patience.look_us(7_000.0 + HOLD_US - 1) == patience.brief_us
    assert patience.look_us(7_000.0 + HOLD_US) == patience.long_us


@pytest.mark.parametrize(("lost_us", "times"), [(999.0, 1), (5_000.0, 6), (0.0, 0), (9_000.0, 0)])
def test_who_was_interrupted_for_moments_looks_out_as_before(
    patience: Patience, lost_us: float, times: int
) -> None:
    patience.lost(lost_us, times, 7_000.0)
    assert patience.look_us(7_000.0) == patience.long_us


def test_slices_that_are_lost_again_and_again_are_expected_for_longer(patience: Patience) -> None:
    now_us, hold_us = 7_000.0, HOLD_US
    for _ in range(8):
        patience.lost(SLICE_US, 1, now_us)
        assert patience.look_us(now_us + hold_us - 1) == patience.brief_us
        assert patience.look_us(now_us + hold_us) == patience.long_us
        now_us += hold_us + 5_000.0
        hold_us = min(2 * hold_us, HOLD_US_MAX)
    assert hold_us == HOLD_US_MAX


def test_after_a_while_without_any_a_lost_slice_counts_as_the_first(patience: Patience) -> None:
    patience.lost(3_000.0, 1, 7_000.0)
    patience.lost(3_000.0, 1, 8_000.0)
    later_us = 8_000.0 + 2 * HOLD_US + 2 * HOLD_US
    patience.lost(3_000.0, 1, later_us)
    assert patience.look_us(later_us + HOLD_US - 1) == patience.brief_us
    assert patience.look_us(later_us + HOLD_US) == patience.long_us


def test_what_threads_lose_together_counts_once(patience: Patience) -> None:
    for at_us in (7_000.0, 7_001.0, 7_300.0, 7_000.0 + SLICE_US - 1):
        patience.lost(3_000.0, 1, at_us)
    assert patience.look_us(7_000.0 + HOLD_US - 1) == patience.brief_us
    assert patience.look_us(7_000.0 + HOLD_US) == patience.long_us


def test_more_threads_than_cores_look_out_briefly(patience: Patience) -> None:
    assert patience.look_us(0.0, thread_count=3) == patience.brief_us


BOUND_FIRST = """
import ctypes, os, sys
cores = sorted(os.sched_getaffinity(0))
library, runtime = ctypes.CDLL(sys.argv[1]), ctypes.CDLL("libgomp.so.1")
library.own_look_us.restype = ctypes.c_double
if sys.argv[2] == "by us":
    library.pm_bind_threads((ctypes.c_int * len(cores))(*cores), len(cores))
library.pm_lend_threads(
    *(ctypes.cast(getattr(runtime, name), ctypes.c_void_p) for name in sys.argv[3:])
)
print(len(os.sched_getaffinity(0)))
print(library.own_look_us(len(cores)), library.own_look_us(len(cores) + 1))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are bound on Linux only")
@pytest.mark.parametrize("bound", ["by us", "by the runtime"])
def test_cores_are_those_of_the_process_and_not_the_one_that_its_thread_is_bound_to(
    threads: ctypes.CDLL, patience: Patience, bound: str
) -> None:
    cores = " ".join(map(str, sorted(os.sched_getaffinity(0))))
    done = subprocess.run(
        [sys.executable, "-S", "-c", BOUND_FIRST, threads._name, bound, *ENTRIES],
        env=os.environ | ({"GOMP_CPU_AFFINITY": cores} if bound == "by the runtime" else {}),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["1", str(patience.long_us), str(patience.brief_us)]


@pytest.mark.parametrize("thread_count", [1, 2, 3, 8])
@pytest.mark.parametrize(("meetings", "pause_us"), [(5_000, 0), (60, 20), (60, 300)])
def test_who_met_the_others_sees_what_they_did_before_and_nothing_later(
    threads: ctypes.CDLL, thread_count: int, meetings: int, pause_us: int
) -> None:
    given = ctypes.c_int(thread_count), ctypes.c_long(meetings), ctypes.c_long(pause_us)
    strays: list[int] = []
    met(lambda: strays.append(threads.gathering_strays(*given)))
    assert strays == [0]


RACES = """
import ctypes, sys
library, arrays = ctypes.CDLL(sys.argv[1]), [(ctypes.c_int * 5)() for _ in range(3)]
for threads in (2, 3):
    for meetings, pause_us in ((2_000, 0), (60, 300)):
        library.gathering_strays(threads, ctypes.c_long(meetings), ctypes.c_long(pause_us))
for given in (1, 2, 3):
    library.lend_own_runtime(given)
    for team in (2, 3, 5):
        for threads in (2, 3, 5):
            library.team_regions(team, threads, ctypes.c_long(100), *arrays)
    library.region(3, *arrays)
    print(sum(map(bool, arrays[0])))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the sanitizer's library is loaded first")
def test_meetings_order_what_threads_write(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    asked = subprocess.run(
        ["g++", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True
    )
    runtime = Path(asked.stdout.strip())
    if not runtime.is_absolute():
        pytest.skip("this g++ has no thread sanitizer")
    library = compiled(tmp_path, "-fsanitize=thread")
    done = subprocess.run(
        [sys.executable, "-S", "-c", RACES, str(library)],
        env={"LD_PRELOAD": str(runtime.resolve()), "TSAN_OPTIONS": "exitcode=66"},
        capture_output=True, text=True, check=False, timeout=MEET_S_MAX,
    )  # fmt: skip
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel places memory where the sanitizer has its own")
    # With fewer threads than were asked for a region has those that there are.
    assert (done.returncode, done.stdout) == (0, "1\n2\n3\n"), done.stderr[-2_000:]


@pytest.mark.parametrize("team", [0, 2, 3, 5])
@pytest.mark.parametrize("thread_count", [1, 2, 3, 5])
def test_each_thread_of_a_region_takes_part_once_whoever_lends_it(
    threads: ctypes.CDLL, team: int, thread_count: int
) -> None:
    taking_part = min(team or thread_count, thread_count)
    indices, before, after = ((ctypes.c_int * 5)() for _ in range(3))
    if team:
        regions = ctypes.c_long(300)
        met(lambda: threads.team_regions(team, thread_count, regions, indices, before, after))
    else:
        met(lambda: threads.region(thread_count, indices, before, after))
    nobody = [0] * (5 - taking_part)
    assert list(indices) == [*range(1, taking_part + 1), *nobody]
    assert sorted(before[:taking_part]) == list(range(1, taking_part + 1))
    # All have arrived behind the barrier; a region within a region is its thread's alone.
    assert list(after) == [taking_part + 100] * taking_part + nobody
