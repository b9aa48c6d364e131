"""The arithmetic of KV memory, against figures worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagemesh.cli.planning.assemble import Asked, Plan, make_plan
from pagemesh.cli.planning.formats import FORMATS, find_format, page_bytes
from pagemesh.cli.planning.lifetime import Pace
from pagemesh.cli.planning.memory import (
    contiguous_waste,
    length_for_tail,
    mean_tail_slots,
    page_shape,
    paged_waste,
    session_count,
    shared_saving,
    windowed_session_bytes,
    windowed_session_count,
)
from pagemesh.cli.planning.shape import ModelShape, read_shape
from pagemesh.cli.planning.weights import Weights, parameter_count
from pagemesh.kernels.layout import PageLayout
from pagemesh.pager.limits import PoolFacts
from pagemesh.pager.storage.disk_file import DiskFile, DiskPlace
from pagemesh.wire.errors import ConfigError

GB = 10**9
GIB = 2**30
LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 131_072, "vocab_size": 128_256, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_7B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4_096, "vocab_size": 32_000, "torch_dtype": "float16",
    "tie_word_embeddings": False,
}  # fmt: skip
PACE = Pace(
    answer_tokens=256, prompt_tokens_s=5_000, answer_tokens_s=33, chunk_tokens=512,
    prompt_chunks=2, growth_pages=2,
)  # fmt: skip
MIXED_CHAT = (800, 2_300, 3_900)
MIXED_SHORT = (600, 900, 1_300, 1_700)


def shape_of(config: dict[str, Any]) -> ModelShape:
    return read_shape(config, "model test")


def planned(config: dict[str, Any], **asked: Any) -> Plan:
    shape = shape_of(config)
    count = parameter_count(config, shape)
    assert count is not None
    defaults: dict[str, Any] = {
        "name": "test", "shape": shape, "kv": find_format(shape.dtype, "--kv-dtype"),
        "page_size": 16, "device_count": 1, "weights": Weights(2 * count, "bfloat16"),
        "memory_bytes": None, "share": 1.0, "pool_bytes": 512 << 20, "session_tokens": None,
        "shared_tokens": 0, "lengths": (), "reserve_tokens": None, "host_bytes": 0,
        "disk_bytes": 0, "pace": PACE, "up_kv": "float32",
    }  # fmt: skip
    return make_plan(Asked(**(defaults | asked)))


def session_bytes(plan: Plan, tokens: int) -> int:
    return plan.page.pages_for(tokens) * plan.page.page_bytes


def test_a_token_of_llama_70b_takes_320_kib_and_32_sequences_of_8192_take_80_gib() -> None:
    plan = planned(LLAMA_70B, pool_bytes=80 * GIB)
    assert plan.page.token_bytes == 320 * 1024
    assert session_bytes(plan, 8_192) == 2.5 * GIB
    assert 32 * session_bytes(plan, 8_192) == 80 * GIB == pytest.approx(85.9 * GB, rel=1e-3)
    assert session_count(plan.page, plan.pages, 8_192) == 32


def test_as_multi_head_the_same_model_takes_eight_times_as_much() -> None:
    plan = planned(LLAMA_70B | {"num_key_value_heads": 64}, pool_bytes=640 * GIB)
    assert plan.page.token_bytes == 2.5 * 2**20
    assert session_bytes(plan, 8_192) == 20 * GIB
    assert 32 * session_bytes(plan, 8_192) == 640 * GIB == pytest.approx(687.2 * GB, rel=1e-4)
    assert planned(LLAMA_70B).multi_head_page.token_bytes == plan.page.token_bytes


def test_28000_tokens_of_llama_2_7b_take_more_than_its_weights() -> None:
    plan = planned(LLAMA_7B)
    assert plan.page.token_bytes == 0.5 * 2**20
    assert session_bytes(plan, 28_000) == pytest.approx(14.68 * GB, rel=1e-3)
    assert plan.weights is not None
    assert plan.weights.count_bytes == pytest.approx(13.48 * GB, rel=1e-3)


@pytest.mark.parametrize(
    ("lengths", "reserved", "contiguous", "pages_of_256", "pages_of_16"),
    [
        (MIXED_CHAT, 4_096, (5_288, 12_288, 0.430), (424, 0.057), (8, 0.0011)),
        (MIXED_SHORT, 2_048, (3_692, 8_192, 0.451), (620, 0.121), (44, 0.0097)),
    ],
)
def test_contiguous_allocation_wastes_what_pages_do_not(
    lengths: tuple[int, ...],
    reserved: int,
    contiguous: tuple[int, int, float],
    pages_of_256: tuple[int, float],
    pages_of_16: tuple[int, float],
) -> None:
    waste = contiguous_waste(lengths, reserved)
    assert (waste.wasted_slots, waste.taken_slots) == contiguous[:2]
    assert waste.share == pytest.approx(contiguous[2], abs=5e-4)
    for size, (slots, share) in ((256, pages_of_256), (16, pages_of_16)):
        paged = paged_waste(lengths, size)
        assert paged.wasted_slots == slots
        assert paged.share == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize(("tokens", "share"), [(200, 0.951), (100, 0.976)])
def test_a_short_answer_in_a_reservation_of_4096_wastes_nearly_all(
    tokens: int, share: float
) -> None:
    assert contiguous_waste([tokens], 4_096).share == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize(("size", "tokens"), [(16, 180), (32, 372), (64, 756), (256, 3_060)])
def test_the_mean_tail_is_under_four_percent_from_a_mean_length_on(size: int, tokens: int) -> None:
    assert mean_tail_slots(size) == (size - 1) / 2
    assert length_for_tail(size) == pytest.approx(tokens)
    tail = mean_tail_slots(size)
    assert tail / (tokens + tail) == pytest.approx(0.04)


def test_a_24_gb_card_holds_nine_sessions_of_a_7b_model_not_twelve() -> None:
    plan = planned(LLAMA_7B, memory_bytes=24 * GB, session_tokens=2_048)
    [session] = plan.sessions
    assert 9 <= session.fit < 10
    assert session.count_bytes == 2_048 * 2**19


def test_four_80_gb_devices_hold_13_sequences_of_32768_beside_a_70b_model() -> None:
    plan = planned(
        LLAMA_70B, memory_bytes=80 * GB, share=0.9, device_count=4, session_tokens=32_768
    )
    assert plan.budget is not None
    assert plan.budget.kv_bytes == pytest.approx(147 * GB, rel=2e-3)
    assert plan.pages * 16 == pytest.approx(448_000, rel=1e-3)
    assert int(plan.sessions[0].fit) == 13
    assert plan.budget.weights_share == pytest.approx(0.49, abs=1e-3)


@pytest.mark.parametrize(("count", "saved"), [(1, 0.0), (2, 0.5), (32, 1 - 1 / 32)])
def test_sharing_a_prefix_saves_all_of_its_copies_but_one(count: int, saved: float) -> None:
    assert shared_saving(count) == saved
    page = planned(LLAMA_7B).page
    own, shared = 100, 64  # pages
    pages = shared + count * own
    tokens = (own + shared) * 16
    assert session_count(page, pages, tokens, shared * 16) == count


def test_at_least_one_token_is_never_shared() -> None:
    page = planned(LLAMA_7B).page
    assert session_count(page, 100, 32, 32) == (100 - 1) / 1


@pytest.mark.parametrize(
    ("name", "largest", "torch_name"),
    [("e4m3", 448.0, "float8_e4m3fn"), ("e5m2", 57_344.0, "float8_e5m2"),
     ("float16", 65_504.0, "float16"), ("bfloat16", None, "bfloat16"),
     ("float32", None, "float32")],
)  # fmt: skip
def test_formats_know_their_largest_number(
    name: str, largest: float | None, torch_name: str
) -> None:
    import torch

    assert FORMATS[name].finite_max == torch.finfo(getattr(torch, torch_name)).max
    assert largest is None or FORMATS[name].finite_max == largest


def test_nvfp4_takes_four_and_a_half_bits() -> None:
    assert FORMATS["nvfp4"].bits(128) == 4.5
    plan = planned(LLAMA_70B, kv=FORMATS["nvfp4"])
    assert plan.page.token_bytes == 320 * 1024 * 4.5 / 16


def test_a_format_with_scales_takes_one_a_head_and_slot() -> None:
    half = planned(LLAMA_70B, kv=FORMATS["e5m2"]).page.token_bytes
    assert half == 160 * 1024 + 80 * 2 * 8 * 4


@pytest.mark.parametrize("name", [name for name, kv in FORMATS.items() if kv.served])
@pytest.mark.parametrize(("heads", "dim", "size"), [(2, 64, 16), (1, 80, 3), (8, 128, 256)])
def test_a_format_that_is_served_takes_what_the_engine_allocates(
    name: str, heads: int, dim: int, size: int
) -> None:
    made = page_bytes(FORMATS[name], layers=3, kv_heads=heads, head_dim=dim, page_size=size)
    assert made == PageLayout(3, heads, dim, size, name).page_bytes  # type: ignore[arg-type]


def test_an_unknown_format_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="--kv-dtype='int3' is not one of float32"):
        find_format("int3", "--kv-dtype")
    assert find_format("FP8", "--kv-dtype") is FORMATS["e4m3"]


# --- several devices


@pytest.mark.parametrize(("page_size", "header_bytes"), [(1, 72), (16, 128), (64, 320)])
def test_a_larger_page_has_a_larger_header(page_size: int, header_bytes: int) -> None:
    """Beside 64 bytes, its tokens of four each, in whole words."""
    page = page_shape(shape_of(LLAMA_70B), FORMATS["bfloat16"], page_size, 1)
    assert page.header_bytes == header_bytes


@pytest.mark.parametrize(
    ("devices", "heads_each", "copies", "total"),
    [(1, 8, 1, 1.0), (4, 2, 1, 1.0), (8, 1, 1, 1.0), (16, 1, 2, 2.0), (64, 1, 8, 8.0)],
)
def test_heads_are_shared_out_and_held_more_than_once_when_there_are_too_few(
    devices: int, heads_each: int, copies: int, total: float
) -> None:
    page = page_shape(shape_of(LLAMA_70B), FORMATS["bfloat16"], 16, devices)
    assert (page.device_head_count, page.copies) == (heads_each, copies)
    assert page.token_bytes == total * 320 * 1024


@pytest.mark.parametrize("devices", [3, 5, 128])
def test_heads_that_cannot_be_shared_out_evenly_are_refused(devices: int) -> None:
    with pytest.raises(ConfigError, match=r"1, 2, 4, 8, 16, 32, 64 can"):
        page_shape(shape_of(LLAMA_70B), FORMATS["bfloat16"], 16, devices)


# --- windows

HALF_WINDOWED = LLAMA_7B | {
    "layer_types": ["full_attention", "sliding_attention"] * 16,
    "sliding_window": 1_024, "max_position_embeddings": 32_768,
}  # fmt: skip


def test_layers_with_a_window_could_give_their_pages_back() -> None:
    config = LLAMA_7B | {"sliding_window": 1_024, "max_position_embeddings": 32_768}
    shape = shape_of(config)
    page = page_shape(shape, FORMATS["float16"], 16, 1)
    assert shape.window_layer_count == 32
    assert windowed_session_bytes(page, shape, 32_768) == 65 * page.page_bytes
    assert windowed_session_bytes(page, shape, 512) == 32 * page.page_bytes


def test_half_the_layers_with_a_window_take_about_half() -> None:
    plan = planned(HALF_WINDOWED)
    full = session_bytes(plan, 32_768)
    assert plan.windowed is not None
    assert plan.windowed.count_bytes == full // 2 + 65 * plan.page.page_bytes // 2
    assert plan.windowed.fit > plan.sessions[-1].fit
    assert plan.sessions[-1].count_bytes == full, "what is allocated"


@pytest.mark.parametrize(
    ("shared_tokens", "full", "windowed"),
    [
        (0, (0, 2_048), (0, 65)),
        (16_000, (1_000, 1_048), (0, 65)),  # the window has left it
        (32_000, (2_000, 48), (17, 48)),  # and reaches back into it
    ],
)
def test_a_shared_prefix_is_held_once_in_full_layers_and_as_far_as_windows_reach(
    shared_tokens: int, full: tuple[int, int], windowed: tuple[int, int]
) -> None:
    """Pages that all share and those that are a session's own: of 2,048, a window reaches 65."""
    plan = planned(
        HALF_WINDOWED, pool_bytes=64 * GIB, session_tokens=32_768, shared_tokens=shared_tokens
    )
    half = plan.page.page_bytes // 2
    room = plan.pages * plan.page.page_bytes - (full[0] + windowed[0]) * half
    assert plan.windowed is not None
    assert plan.windowed.fit == pytest.approx(room / ((full[1] + windowed[1]) * half))
    assert plan.windowed.fit > plan.sessions[-1].fit


@pytest.mark.parametrize("tokens", [1, 17, 512, 1_024, 1_025, 1_100, 32_768])
@pytest.mark.parametrize("shared_tokens", [0, 16, 1_000, 31_000, 1 << 20])
def test_windows_never_make_room_for_fewer_sessions(tokens: int, shared_tokens: int) -> None:
    shape = shape_of(HALF_WINDOWED)
    page = page_shape(shape, FORMATS["float16"], 16, 1)
    for pages in (1, 64, 100, 5_000):
        all_kept = session_count(page, pages, tokens, shared_tokens)
        fit = windowed_session_count(page, shape, pages, tokens, shared_tokens)
        if page.pages_for(tokens) <= 65:
            assert fit == pytest.approx(all_kept), "nothing goes early"
        else:
            assert fit >= all_kept


# --- what does not fit


def test_weights_that_leave_no_room_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"141\.1 GB .* leave no room in 80 GB"):
        planned(LLAMA_70B, memory_bytes=80 * GB)


def test_memory_without_knowing_the_weights_is_refused_with_what_to_give() -> None:
    with pytest.raises(ConfigError, match="--weights SIZE"):
        planned(LLAMA_70B, memory_bytes=80 * GB, weights=None)


def test_a_pool_below_one_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="not one page of 5"):
        planned(LLAMA_70B, pool_bytes=1 << 20)


def test_a_session_beyond_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="context of 4096"):
        planned(LLAMA_7B, session_tokens=4_097)


def test_a_length_beyond_its_reservation_is_refused() -> None:
    with pytest.raises(ConfigError, match="--reserve-tokens"):
        planned(LLAMA_7B, lengths=(5_000,), reserve_tokens=4_096)


def test_tiers_hold_whole_pages() -> None:
    plan = planned(LLAMA_7B, host_bytes=17 << 20, disk_bytes=1 << 40)
    page = plan.page.page_bytes
    assert [(tier.name, tier.pages) for tier in plan.tiers] == [
        ("device", 64), ("host", 2), ("disk", (1 << 40) // (page + 128)),
    ]  # fmt: skip
    assert planned(LLAMA_7B).tiers == ()


def test_a_tier_is_planned_with_as_many_pages_as_it_has_when_it_runs(tmp_path: Path) -> None:
    """Each has a record beside it."""
    plan = planned(LLAMA_7B, page_size=1, disk_bytes=2 << 30, host_bytes=1 << 30)
    page_bytes = plan.page.page_bytes
    facts = PoolFacts("h", 1, 1, 64, 1, page_bytes, bytes(32), "/pool")
    for tier, tier_bytes in zip(plan.tiers[1:], (1 << 30, 2 << 30), strict=True):
        place = DiskPlace(tmp_path / tier.name, "h", tier_bytes, bytes(32))
        file, _ = DiskFile.open(place, facts)
        assert tier.pages == file.slot_count < tier_bytes // page_bytes
        file.close()
