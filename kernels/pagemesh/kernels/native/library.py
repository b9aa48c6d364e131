"""Loads ``libpagemesh_native.so`` once, chooses a CPU level and lends it threads.

The library brings no threading runtime. ``lend_threads`` hands it the OpenMP runtime that
torch has loaded (or will load), so a process never runs two pools of spinning threads. A
process that never calls it, such as the pager, computes on the calling thread.

Environment: ``PAGEMESH_CPU_LEVEL`` = ``amx`` | ``avx512_bf16`` | ``avx512`` | ``avx2`` |
``portable`` forces a level.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from pagemesh.wire.errors import ConfigError

ABI_VERSION = 20
LEVEL_VARIABLE = "PAGEMESH_CPU_LEVEL"
SPIN_VARIABLE, SPIN_COUNT = "GOMP_SPINCOUNT", "1000"
LIBRARY_PATH = Path(__file__).with_name("libpagemesh_native.so")
BUILD_SCRIPT = Path(__file__).parents[3] / "build_native.py"
_OPENMP_ENTRIES = (
    "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_get_num_procs",
)  # fmt: skip


class CpuLevel(enum.IntEnum):
    """Instruction sets a kernel is compiled for; each includes those below it."""

    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3
    AMX = 4


class PagesStruct(ctypes.Structure):
    """``PmPages``: where K and V of one layer lie in a pool, strides in elements."""

    _fields_ = [
        ("base", ctypes.c_void_p),
        ("page_stride", ctypes.c_long),
        ("value_offset", ctypes.c_long),
        ("head_stride", ctypes.c_long),
        ("page_count", ctypes.c_long),
        ("page_size", ctypes.c_long),
        ("kv_heads", ctypes.c_long),
        ("head_dim", ctypes.c_long),
        ("kv_type", ctypes.c_long),
        ("scale_offset_bytes", ctypes.c_long),
    ]


class MatrixStruct(ctypes.Structure):
    """``PmMatrix``: packed panels, bias or null, the shape [n, k], ``PmWeightType``, and whether
    rows are rounded to bfloat16."""

    _fields_ = [
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_long),
        ("k", ctypes.c_long),
        ("weight_type", ctypes.c_long),
        ("rounds_rows", ctypes.c_long),
    ]


class LayerStruct(ctypes.Structure):
    """``PmLayer``: the weights of a layer."""

    _fields_ = [
        ("attention_norm", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("qkv", MatrixStruct),
        ("output", MatrixStruct),
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
    ]


class DecoderStruct(ctypes.Structure):
    """``PmDecoder``: the layers of a decoder and what comes before and after them."""

    _fields_ = [
        ("layers", ctypes.c_void_p),
        ("embedding", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("head", MatrixStruct),
        ("layer_count", ctypes.c_long),
        ("hidden", ctypes.c_long),
        ("heads", ctypes.c_long),
        ("kv_heads", ctypes.c_long),
        ("head_dim", ctypes.c_long),
        ("mlp", ctypes.c_long),
        ("vocab", ctypes.c_long),
        ("positions", ctypes.c_long),
        ("norm_epsilon", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
        ("row_invariant", ctypes.c_long),
        ("embedding_type", ctypes.c_long),
    ]


class RowsStruct(ctypes.Structure):
    """``PmRows``: a step's rows, their page tables, and which of them are wanted."""

    _fields_ = [
        ("tokens", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("sequence", ctypes.c_void_p),
        ("position", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("table_indptr", ctypes.c_void_p),
        ("wanted", ctypes.c_void_p),
        ("rows", ctypes.c_long),
        ("sequences", ctypes.c_long),
        ("wanted_count", ctypes.c_long),
    ]


class DrawsStruct(ctypes.Structure):
    """``PmDraws``: which rows to draw from, how, and within which limits, or null."""

    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("temperatures", ctypes.c_void_p),
        ("uniforms", ctypes.c_void_p),
        ("min_p", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("count", ctypes.c_long),
    ]


class ScoredStruct(ctypes.Structure):
    """``PmScored``: of which rows log-probabilities are asked for, and how many."""

    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
        ("top_counts", ctypes.c_void_p),
        ("column_count", ctypes.c_long),
        ("count", ctypes.c_long),
    ]


class EditsStruct(ctypes.Structure):
    """``PmEdits``: masks, biases and penalties of a row."""

    _fields_ = [
        ("masked", ctypes.c_void_p),
        ("biased", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("repeated", ctypes.c_void_p),
        ("counted", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("masked_count", ctypes.c_long),
        ("biased_count", ctypes.c_long),
        ("repeated_count", ctypes.c_long),
        ("counted_count", ctypes.c_long),
        ("repetition", ctypes.c_float),
        ("frequency", ctypes.c_float),
        ("presence", ctypes.c_float),
    ]


class DraftsStruct(ctypes.Structure):
    """``PmDrafts``: the histories that drafts are guessed from, and how many drafts."""

    _fields_ = [
        ("history", ctypes.c_void_p),
        ("history_stride", ctypes.c_long),
        ("history_count", ctypes.c_void_p),
        ("chances", ctypes.c_void_p),
        ("each_max", ctypes.c_long),
        ("rows_max", ctypes.c_long),
    ]


class RunStruct(ctypes.Structure):
    """``PmRun``: successive steps, and when the run ends."""

    _fields_ = [
        ("decoder", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("batch", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("drafts", ctypes.c_void_p),
        ("draws", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("stops", ctypes.c_void_p),
        ("stop_indptr", ctypes.c_void_p),
        ("lease_words", ctypes.c_void_p),
        ("lease_word_count", ctypes.c_long),
        ("lease_slots", ctypes.c_void_p),
        ("leases", ctypes.c_void_p),
        ("same", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        ("waiting", ctypes.c_void_p),
        ("waiting_count", ctypes.c_long),
        ("token_count", ctypes.c_long),
        ("for_us", ctypes.c_double),
        ("drawn", ctypes.c_void_p),
        ("drawn_count", ctypes.c_void_p),
        ("drafted_count", ctypes.c_void_p),
        ("took_us", ctypes.c_void_p),
    ]


CHANCES = 2
"""``PM_CHANCES``."""
STEP_PHASES = 3
"""``PM_PHASES``: the phases that a step's time is divided into."""
_P, _L, _I, _U32, _U64, _F = (
    ctypes.c_void_p,
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_uint64,
    ctypes.c_float,
)
_PAGES = ctypes.POINTER(PagesStruct)
_PROTOTYPES: dict[str, tuple[type | None, tuple[object, ...]]] = {
    "pm_abi_version": (_I, ()),
    "pm_best_level": (_I, ()),
    "pm_set_level": (_I, (_I,)),
    "pm_level": (_I, ()),
    "pm_lend_threads": (None, (_P, _P, _P, _P)),
    "pm_bind_threads": (None, (_P, _I)),
    "pm_check_word": (_U64, (_P, _L)),
    "pm_headers_write": (_L, (_P, _P, _L, _P, _P)),
    "pm_headers_mark": (_L, (_P, _P, _L, _P)),
    "pm_headers_keep": (_L, (_P, _P, _L)),
    "pm_headers_fresh": (_L, (_P, _L, _P, _L, _L, _U64)),
    "pm_headers_scan": (None, (_P, _L, _L, _L, _P, _P)),
    "pm_word_store": (None, (_P, _U64)),
    "pm_word_load": (_U64, (_P,)),
    "pm_word_advance": (None, (_P,)),
    "pm_word_await": (None, (_P, _U32, _L)),
    "pm_words_same": (None, (_P, _L, _P, _P, _L, _P)),
    "pm_linear_pack": (None, (_P, _L, _P, _L, _L, _L)),
    "pm_linear_pack_slim": (_I, (_P, _L, _P, _L, _L, _I)),
    "pm_linear": (None, (_P, _L, _P, _P, _L, _L, _I, _I)),
    "pm_rms_norm": (None, (_P, _L, _P, _P, _L, _L, _L, _F, _I)),
    "pm_rope": (None, (_P, _L, _P, _P, _L, _L, _L, _L, _I)),
    "pm_silu_mul": (None, (_P, _L, _P, _L, _L, _L, _I)),
    "pm_log_softmax": (None, (_P, _L, _P, _L, _L, _L, _I)),
    "pm_softmax_draw": (_L, (_P, _L, _L, _P, _L, _P, _P, _P, _I)),
    "pm_top_scores": (_L, (_P, _L, _L, _L, _P, _L, _P, _P, _P, _I)),
    "pm_edit_rows": (_L, (_P, _L, _L, _L, _P, _P, _P, _L, _P, _I)),
    "pm_restore_rows": (None, (_P, _L, _L, _P, _P, _P, _L, _P, _I)),
    "pm_kv_write": (_L, (_PAGES, _P, _L, _P, _L, _P, _L, _I)),
    "pm_kv_gather": (_L, (_PAGES, _P, _L, _L, _L, _P, _P, _I)),
    "pm_paged_attention": (
        _L,
        (_PAGES, _P, _L, _P, _L, _L, _L, _P, _P, _L, _P, _P, _F, _F, _L, _I),
    ),
    "pm_page_copy": (_L, (_P, _L, _L, _P, _P, _L, _I)),
    "pm_decoder_workspace": (_L, (_P, _L, _I)),
    "pm_decoder_run": (_L, (_P, _I)),
    "pm_decoder_step": (_L, (_P, _P, _P, _P, _P, _P, _P, _I)),
    "pm_probe_stream": (_F, (_P, _L, _I)),
    "pm_probe_arithmetic": (_L, (_L, _I)),
}


_BRIEF = frozenset(
    {"pm_word_store", "pm_word_load", "pm_word_advance", "pm_words_same", "pm_headers_fresh"}
)
"""Calls of at most a few microseconds. They keep the interpreter's lock: a thread that had waited
for it would keep it for all of its work, while a step waits."""


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library at its level.

    Raises ``ConfigError`` when the file is missing, was built from another version of the
    sources, or ``PAGEMESH_CPU_LEVEL`` names a level this machine lacks.
    """
    if not LIBRARY_PATH.exists():
        raise ConfigError(f"the native library {LIBRARY_PATH} is missing; {_advice()}")
    try:
        loaded = ctypes.CDLL(str(LIBRARY_PATH))
        found = int(loaded.pm_abi_version())
        if found != ABI_VERSION:
            raise ConfigError(f"{LIBRARY_PATH} has ABI {found}, not {ABI_VERSION}; {_advice()}")
        holding = ctypes.PyDLL(str(LIBRARY_PATH))
        for name, (result, arguments) in _PROTOTYPES.items():
            entry = getattr(holding if name in _BRIEF else loaded, name)
            setattr(loaded, name, entry)
            entry.restype, entry.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise ConfigError(f"{LIBRARY_PATH} does not load: {error}; {_advice()}") from None
    _choose_level(loaded)
    return loaded


def _advice() -> str:
    """How to get the library back, in a checkout or where a wheel was installed."""
    if BUILD_SCRIPT.exists():
        return f"build it with: python {BUILD_SCRIPT} (needs g++ or clang, and cmake)"
    return (
        "install a wheel of pagemesh that was built for this machine, or its sources (needs g++ or "
        "clang), with: pip install --no-deps --no-cache-dir --force-reinstall WHEEL_OR_SOURCES"
    )


def _choose_level(loaded: ctypes.CDLL) -> None:
    loaded.pm_set_level(_level_of(loaded, os.environ.get(LEVEL_VARIABLE, "")))


def _level_of(loaded: ctypes.CDLL, name: str) -> CpuLevel:
    best = CpuLevel(loaded.pm_best_level())
    name = name.strip().upper()
    if name and name not in CpuLevel.__members__:
        known = ", ".join(level.name.lower() for level in CpuLevel)
        raise ConfigError(f"{LEVEL_VARIABLE}={name.lower()} is not one of {known}")
    wanted = CpuLevel[name] if name else best
    if wanted > best:
        raise ConfigError(
            f"{LEVEL_VARIABLE}={wanted.name.lower()} but this CPU goes up to {best.name.lower()}; "
            "leave it out for the best there is"
        )
    return wanted


def check_level(name: str) -> None:
    """Raises ``ConfigError`` for a level that this CPU lacks or that does not exist; an empty name
    means the best level."""
    _level_of(library(), name)


def cpu_level() -> CpuLevel:
    """The level whose kernels run in this process."""
    return CpuLevel(library().pm_level())


def bound_spinning() -> None:
    """Have idle OpenMP threads sleep after a few microseconds of spinning, unless the user has
    configured it otherwise. To be called before torch is imported, since its OpenMP runtime reads
    the setting once.

    Costs nothing on a quiet machine. Without it threads that wait for one that was descheduled
    burn the core it needs: with another process on the cores products ran 3 to 10 times slower.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(SPIN_VARIABLE, SPIN_COUNT)


@functools.cache
def lend_threads() -> bool:
    """Let the kernels run on torch's OpenMP threads; False when there is no such runtime.

    Without one the kernels stay on the calling thread. Idempotent; the kernels' launchers
    call it before their first use.
    """
    for path in _openmp_candidates():
        try:
            runtime = ctypes.CDLL(str(path))
            entries = [
                ctypes.cast(getattr(runtime, name), ctypes.c_void_p) for name in _OPENMP_ENTRIES
            ]
        except (OSError, AttributeError):
            continue
        library().pm_lend_threads(*entries)
        return True
    return False


def bind_threads(cores: Sequence[int]) -> None:
    """Bind thread ``i`` of those that compute for this thread to ``cores[i]``, this thread being
    the first; with no cores, let them run anywhere. Not while anything computes.

    The scheduler tends to wake a thread on its waker's core and to leave it there: two threads of a
    step then share one core and take turns. Only on Linux; elsewhere this does nothing.
    """
    library().pm_bind_threads((ctypes.c_int * len(cores))(*cores), len(cores))


def _openmp_candidates() -> list[Path]:
    """torch's own runtime first, found without importing torch; then the system's."""
    found: list[Path] = []
    spec = importlib.util.find_spec("torch")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for pattern in ("lib/libgomp*.so*", "../torch.libs/libgomp*.so*", "lib/libiomp5*"):
            found.extend(sorted(Path(folder).glob(pattern)))
    return [*found, Path("libgomp.so.1")]
