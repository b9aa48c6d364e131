"""Captured steps, streams and locks of a GPU, over a CUDA that only plays its part."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.engine.fake_cuda import FakeCuda
from tests.unit.engine.harness import Pages, load_decoder, some_tokens
from tests.unit.engine.models import VOCAB
from tests.unit.engine.test_cuda_decoder import TOLERANCE, device_weights, rows_of, save_small

from pagemesh.engine.cuda import driver, launches, memory
from pagemesh.engine.cuda.decoder import CudaDecoder
from pagemesh.engine.cuda.device import CudaMaker, GpuDevice
from pagemesh.engine.cuda.graph_bytes import PROMPTS_MAX
from pagemesh.engine.cuda.graphs import Bucket, StepGraphs
from pagemesh.engine.cuda.memory import DeviceMemory
from pagemesh.engine.forward import Decoder
from pagemesh.kernels.ops import KvPool

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


@pytest.fixture
def cpu(tmp_path: Path) -> tuple[Decoder, KvPool]:
    save_small(tmp_path / "model", "llama")
    return load_decoder(tmp_path / "model", deterministic=False)


def steps_apart(cpu: tuple[Decoder, KvPool], device: CudaDecoder, pool: KvPool,
                steps: list[list[tuple[int, int]]]) -> float:  # fmt: skip
    """Steps of (start, tokens) by sequence on both; the largest difference of logits and of what
    is in the pages, by the widest."""
    decoder, own_pool = cpu
    pages = Pages(own_pool)
    tables = [pages.table(64) for _ in range(max(map(len, steps)))]
    worst = 0.0
    for step, parts in enumerate(steps):
        tokens, batch, every = rows_of(
            own_pool,
            [
                (table, some_tokens(count, vocab=VOCAB, seed=100 * step + start), start)
                for table, (start, count) in zip(tables, parts, strict=False)
            ],
        )
        wanted = every[np.cumsum([count for _, count in parts]) - 1]
        expected = decoder.logits(decoder.hidden(tokens, batch, wanted, own_pool))
        hidden, got = device.step(tokens, batch, wanted, pool, logits=True)
        assert got is not None and got.shape == expected.shape and len(hidden) == len(wanted)
        worst = max(worst, float((got - expected).abs().max() / expected.abs().max()))
    written = own_pool.memory.view(torch.float32), pool.memory.view(torch.float32)
    return max(worst, float((written[0] - written[1]).abs().max() / written[0].abs().max()))


def answers(*starts: int) -> list[tuple[int, int]]:
    """A token each, at those positions."""
    return [(start, 1) for start in starts]


def test_replayed_steps_of_every_size_share_input_and_output_and_agree_with_the_cpu(
    cuda: FakeCuda, cpu: tuple[Decoder, KvPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bucket, "stands_in", lambda *_: False)
    decoder, pool = cpu
    pool.memory.view(torch.float32).normal_()
    twin = KvPool(pool.layout, pool.memory.numpy().copy())
    weights = device_weights(tmp_path / "model", decoder)
    device = CudaDecoder(decoder.config, weights, with_graphs=True, sequence_count_max=3)
    steps = [
        answers(5, 40, 17),
        answers(6, 41, 18),
        answers(50),
        answers(7, 42),
        answers(8, 43, 19),
    ]
    assert steps_apart(cpu, device, twin, steps) < TOLERANCE
    assert len(cuda.graphs) == 3, "of 1, 2 and 4 rows, each captured once"
    assert cuda.made == [cuda.streams[0]] and len({id(one) for one in cuda.streams}) == 1


def test_prompts_and_prompts_beside_answers_are_replayed_and_agree_with_the_cpu(
    cuda: FakeCuda, cpu: tuple[Decoder, KvPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bucket, "stands_in", lambda *_: False)
    decoder, pool = cpu
    pool.memory.view(torch.float32).normal_()
    twin = KvPool(pool.layout, pool.memory.numpy().copy())
    weights = device_weights(tmp_path / "model", decoder)
    device = CudaDecoder(decoder.config, weights, with_graphs=True, sequence_count_max=3)
    steps = [
        [(0, 20)],  # one prompt
        [(20, 1), (0, 9), (0, 5)],  # beside an answer
        [(21, 1), (9, 2), (5, 30)],  # a short rest goes by itself
        [(22, 1), (11, 1), (35, 6)],  # captured before
        [(23, 4), (12, 7)],  # prompts alone, fewer
    ]
    assert steps_apart(cpu, device, twin, steps) < TOLERANCE
    assert [len(graph.calls) for graph in cuda.graphs] == [1] * 4
    assert steps_apart(cpu, device, twin, [[(0, 1)] * 5 + [(0, 5)]]) < TOLERANCE, (
        "more rows than the worker takes"
    )
    assert len(cuda.graphs) == 4


def test_steps_that_a_larger_graph_stands_in_for_agree_with_the_cpu(
    cuda: FakeCuda, cpu: tuple[Decoder, KvPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, pool = cpu
    pool.memory.view(torch.float32).normal_()
    twin = KvPool(pool.layout, pool.memory.numpy().copy())
    weights = device_weights(tmp_path / "model", decoder)
    device = CudaDecoder(decoder.config, weights, with_graphs=True, sequence_count_max=16)
    larger = [Bucket(16, 4, 64), Bucket(0, 1, 64), Bucket(16, 4)]
    monkeypatch.setattr("pagemesh.engine.cuda.decoder.common_buckets", lambda *_: larger)
    device.prepare(twin)
    steps = [
        [(0, 20)],
        [(20, 1), (0, 9), (0, 5)],
        [(21, 1), (9, 1), (5, 30)],
        [(22, 4), (10, 17)],
        answers(26, 27, 35),
        answers(27),
    ]
    assert steps_apart(cpu, device, twin, steps) < TOLERANCE
    assert len(cuda.graphs) == 3, "none was captured beside those that were there"


def test_a_chunk_of_which_nothing_is_wanted_is_replayed_and_gives_nothing(
    cuda: FakeCuda, cpu: tuple[Decoder, KvPool], tmp_path: Path
) -> None:
    decoder, pool = cpu
    twin = KvPool(pool.layout, pool.memory.numpy().copy())
    device = CudaDecoder(
        decoder.config, device_weights(tmp_path / "model", decoder), with_graphs=True
    )
    table, none = Pages(pool).table(64), torch.empty(0, dtype=torch.int64)
    tokens, batch, every = rows_of(pool, [(table, some_tokens(9, vocab=VOCAB, seed=1), 0)])
    decoder.hidden(tokens, batch, every, pool)
    hidden, logits = device.step(tokens, batch, none, twin, logits=True)
    assert logits is not None and len(hidden) == len(logits) == 0
    hidden, logits = device.step(tokens, batch, every[-1:], twin, logits=False)
    assert logits is None and len(hidden) == 1 and len(cuda.graphs) == 1
    written = pool.memory.view(torch.float32), twin.memory.view(torch.float32)
    torch.testing.assert_close(written[1], written[0], rtol=1e-3, atol=1e-3)


def test_what_no_graph_has_room_for_goes_without_one(
    cuda: FakeCuda, cpu: tuple[Decoder, KvPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, pool = cpu
    device = CudaDecoder(
        decoder.config, device_weights(tmp_path / "model", decoder), with_graphs=True
    )
    captured: list[Bucket] = []
    monkeypatch.setattr(StepGraphs, "step_for", lambda _self, one, _may: captured.append(one))
    device._use(pool)
    pages = Pages(pool)

    def graph_of(parts: list[tuple[int, int]], wanted_count: int) -> list[Bucket]:
        """Of sequences with so many tokens from a place on."""
        captured.clear()
        own = [
            (pages.table(48), some_tokens(count, vocab=VOCAB, seed=1), start)
            for start, count in parts
        ]
        _, batch, _ = rows_of(pool, own)
        device._graph_of(batch, wanted_count, device._split(batch))
        return list(captured)

    assert graph_of([(40, 1), (0, 5)], 2) == [Bucket(8, 4, 16)]
    assert graph_of([(0, 40)], PROMPTS_MAX) == [Bucket(0, 1, 48)]
    assert graph_of([(0, 40)], PROMPTS_MAX + 1) == [], "more are wanted than it gives"
    assert graph_of([(0, 4)] * (PROMPTS_MAX + 1), 1) == [], "more prompts than it takes"
    monkeypatch.setattr(launches, "STATES_BYTES_MAX", 8 * 4 * device._span_bytes - 1)
    assert graph_of([(40, 1), (0, 5)], 2) == [], "its padding would take too much"
    device._table_pages_max = 0
    assert graph_of([(0, 40)], 1) == [], "longer page tables than there is room for"


def test_a_prompt_that_is_scored_goes_without_a_graph(
    cuda: FakeCuda, cpu: tuple[Decoder, KvPool], tmp_path: Path
) -> None:
    decoder, pool = cpu
    twin = KvPool(pool.layout, pool.memory.numpy().copy())
    weights = device_weights(tmp_path / "model", decoder)
    device = CudaDecoder(decoder.config, weights, with_graphs=True)
    table = Pages(pool).table(64)
    tokens, batch, every = rows_of(pool, [(table, some_tokens(40, vocab=VOCAB, seed=1), 0)])
    expected = decoder.hidden(tokens, batch, every, pool)
    got, logits = device.step(tokens, batch, every, twin, logits=False)
    assert logits is None and cuda.graphs == []
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_steps_of_more_rows_than_a_worker_takes_go_without_a_graph(
    cuda: FakeCuda, cpu: tuple[Decoder, KvPool], tmp_path: Path
) -> None:
    decoder, pool = cpu
    twin = KvPool(pool.layout, pool.memory.numpy().copy())
    weights = device_weights(tmp_path / "model", decoder)
    device = CudaDecoder(decoder.config, weights, with_graphs=True, sequence_count_max=2)
    assert steps_apart(cpu, device, twin, [answers(5, 40, 17)]) < TOLERANCE
    assert cuda.graphs == []


def test_common_graphs_are_captured_with_the_first_pool_and_touch_none_of_its_pages(
    cuda: FakeCuda, cpu: tuple[Decoder, KvPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, pool = cpu
    pool.memory.view(torch.float32).normal_()
    before = pool.memory.clone()
    weights = device_weights(tmp_path / "model", decoder)
    device = CudaDecoder(decoder.config, weights, with_graphs=True, sequence_count_max=2)
    monkeypatch.setattr(
        "pagemesh.engine.cuda.decoder.common_buckets", lambda *_: [Bucket(1, 1), Bucket(2, 1)]
    )
    device.prepare(pool)
    assert len(cuda.graphs) == 2
    assert torch.equal(pool.memory, before)
    twin = KvPool(pool.layout, pool.memory.numpy().copy())
    assert steps_apart(cpu, device, pool, [answers(5), answers(6, 8)]) < TOLERANCE
    assert len(cuda.graphs) == 2, "both were there"
    device.prepare(twin)
    assert len(cuda.graphs) == 2, "with a later pool answers may be waiting"


def test_without_memory_for_what_graphs_share_steps_go_on_without_any(
    cuda: FakeCuda, cpu: tuple[Decoder, KvPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, pool = cpu
    twin = KvPool(pool.layout, pool.memory.numpy().copy())
    weights = device_weights(tmp_path / "model", decoder)
    device = CudaDecoder(decoder.config, weights, with_graphs=True)

    def full(*_given: object, **_named: object) -> None:
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr("pagemesh.engine.cuda.decoder.GraphMemory", full)
    device.prepare(twin)
    assert steps_apart(cpu, device, twin, [answers(5, 40)]) < TOLERANCE
    assert cuda.graphs == []


def test_a_step_is_over_when_its_own_stream_is_whatever_else_the_device_does(
    cuda: FakeCuda,
) -> None:
    device = GpuDevice(torch.device("cuda", 0), SimpleNamespace(place="cuda:x"))
    device.finish()
    assert (cuda.current.waits, cuda.whole_device_waits) == (1, 0)


def test_pages_are_copied_on_a_stream_that_was_there_before_any_other(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _index: SimpleNamespace(uuid="GPU-1")
    )
    maker = CudaMaker(torch.device("cuda", 0))
    [own] = cuda.made
    for _ in range(2):
        with maker.copying():
            pass
    assert cuda.made == [own] and own.waits == 2 and cuda.current.waits == 0


def test_memory_is_made_mapped_and_let_go_while_nothing_is_captured(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def call(name: str, *_given: Any) -> None:
        assert driver.WHOLE_DEVICE.locked() or name == "cuMemExportToShareableHandle"
        called.append(name)

    monkeypatch.setattr(driver, "call", call)
    monkeypatch.setattr(memory, "_granularity_bytes", lambda _index: 1 << 21)
    monkeypatch.setattr(torch, "as_tensor", lambda *_, **__: torch.ones(8, dtype=torch.uint8))
    with DeviceMemory.make(1 << 20, 0) as made:
        assert not made.bytes.any()
        assert (cuda.current.waits, cuda.whole_device_waits) == (1, 0)
        made.bytes[:] = 7
    with contextlib.closing(DeviceMemory.adopt(3, 1 << 20, 0)) as mapped:
        assert mapped.bytes.all()
    assert cuda.whole_device_waits == 2, "nothing uses what is unmapped"
    assert called.count("cuMemRelease") == called.count("cuMemUnmap") == 2
    assert not driver.WHOLE_DEVICE.locked()
