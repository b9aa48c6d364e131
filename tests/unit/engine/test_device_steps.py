"""Steps on a device, through Triton's interpreter, over memory that came by descriptor."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.pool_memories import memories
from tests.unit.engine.harness import Pages, some_tokens
from tests.unit.engine.models import VOCAB
from tests.unit.engine.test_cuda_decoder import save_small
from tests.unit.engine.test_executor import make_row

from pagemesh.engine.device import HOST
from pagemesh.engine.executor import ModelExecutor
from pagemesh.engine.memory_box import MemoryBox
from pagemesh.engine.opening import Engine, open_engine
from pagemesh.engine.pool import WorkerPool
from pagemesh.engine.worker.plan import RowResult, Sample, StepPlan, StepRow
from pagemesh.kernels.native.header_writer import HeaderWriter
from pagemesh.pager.storage.pool_memory import PoolMemory
from pagemesh.pager.storage.pool_store import PoolStore
from pagemesh.runtime.settings import WorkerConfig
from pagemesh.wire.errors import ConfigError, Gone, Stale
from pagemesh.wire.pager_messages import SessionOpened
from pagemesh.wire.pool_format import IN_FILE, MEMORY_SUFFIX, HeaderState
from pagemesh.wire.tokens import U32, pack_extents
from pagemesh.wire.work_messages import Sampling

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
GREEDY = Sampling(temperature=0.0, max_tokens=9)
SCORED = Sampling(temperature=0.0, max_tokens=9, logprobs=VOCAB)
TOLERANCE = 1e-4
"""Between log-probabilities of float32 engines that sum in another order."""


def settings_for(folder: Path, device: str) -> WorkerConfig:
    named = {"device": device, "model": str(folder / "model"), "model_name": "m"}
    return WorkerConfig(**named, cache_dir=str(folder / "cache"))  # type: ignore[arg-type]


class Host:
    """A pool that a store of the pager made for an engine, with its part played by hand."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        spec = engine.model.pool_spec
        folder.mkdir()
        self.engine, layout = engine, engine.model.layout
        self.store = PoolStore.create(folder, "here", spec, 64 * spec.page_bytes)
        self.memory, self.box = PoolMemory(folder), None
        if engine.maker is not None:
            self.box = MemoryBox(engine.maker, folder / f"w{MEMORY_SUFFIX}")
            self.memory.make(self.store.facts, "w")
        facts = self.store.facts
        self.opened = SessionOpened(
            host="here", epoch=1, pool_incarnation=facts.incarnation, pool=0, pool_path=facts.path,
            page_count=facts.page_count, session_ttl_ms=1000, heartbeat_ms=100,
        )  # fmt: skip
        self.executor = ModelExecutor(engine.decoder, layout, engine.device, self.box)
        self.pool = WorkerPool.attach(self.opened, layout, self.box)
        self.executor.use(self.pool)
        self._pages = Pages(self.pool.pages)
        self.steps = 0

    def grant(self, lease: int, token_count: int) -> U32:
        table = self._pages.table(token_count)
        HeaderWriter(self.store.file.headers).write(
            pack_extents(table), HeaderState.HELD,
            np.full(len(table), 5, np.uint64).tobytes(), writer=0, root=0,
        )  # fmt: skip
        self.store.file.headers.set_lease_word(lease, lease)
        return table

    def run(self, *rows: StepRow, copies: tuple[tuple[int, int], ...] = ()) -> list[RowResult]:
        self.steps += 1
        return list(self.executor.run(StepPlan(self.steps, rows, copies)).rows)

    def close(self) -> None:
        self.executor.close()
        if self.box is not None:
            self.box.close()
        self.memory.close()
        self.store.file.remove()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("device")
    save_small(made / "model", "qwen2-bias")
    return made


@pytest.fixture
def device(folder: Path, tmp_path: Path) -> Iterator[Host]:
    host = Host(open_engine(settings_for(folder, "interpreter")), tmp_path / "device")
    yield host
    host.close()


@pytest.fixture
def cpu(folder: Path, tmp_path: Path) -> Iterator[Host]:
    host = Host(open_engine(settings_for(folder, "cpu")), tmp_path / "cpu")
    yield host
    host.close()


def forked(host: Host, sampling: Sampling) -> list[RowResult]:
    """A prompt in two chunks, whose last token two choices are drawn from; then the second is
    given a copy of the last page, and both go on for two steps beside a chunk of another."""
    prompt, other = some_tokens(21, vocab=VOCAB), some_tokens(9, vocab=VOCAB, seed=1)
    first, stranger = host.grant(1, 32), host.grant(3, 16)
    results = host.run(make_row(1, first, prompt, 0, 8))
    last = make_row(1, first, prompt, 8, 13, sampling=sampling)
    second = np.append(first[:1], host.grant(2, 16))
    fork = replace(last.samples[0], key=replaced_choice(last.samples[0], 1))
    [drawn] = host.run(replace(last, samples=(*last.samples, fork)))
    results.append(drawn)
    contexts = [np.append(prompt, np.uint32(one.token)) for one in drawn.drawn]
    copies = ((int(first[1]), int(second[1])),)
    for step in range(2):
        rows = [
            make_row(lease, table, context, len(context) - 1, 1, sampling=sampling)
            for lease, table, context in zip((1, 2), (first, second), contexts, strict=True)
        ]
        beside = make_row(3, stranger, other, 4 * step, 5 - step)
        got = host.run(*rows, beside, copies=() if step else copies)
        results += got
        contexts = [
            np.append(context, np.uint32(one.drawn[0].token))
            for context, one in zip(contexts, got, strict=False)
        ]
    return results


def replaced_choice(sample: Sample, choice: int) -> Any:
    return type(sample.key)(request=sample.key.request, attempt=1, choice=choice)


def tokens_of(results: Sequence[RowResult]) -> list[list[int]]:
    return [[one.token for one in result.drawn] for result in results]


@pytest.mark.parametrize("sampling", [GREEDY, SCORED, Sampling(seed=4, top_p=0.9, max_tokens=9)])
def test_chunks_forks_copies_and_tokens_are_those_of_the_cpu(
    device: Host, cpu: Host, sampling: Sampling
) -> None:
    got, expected = forked(device, sampling), forked(cpu, sampling)
    assert not any(result.revoked or result.poisoned for result in got)
    assert tokens_of(got) == tokens_of(expected)
    if sampling.logprobs:
        for mine, theirs in zip(got, expected, strict=True):
            for one, other in zip(mine.drawn, theirs.drawn, strict=True):
                assert one.scores is not None and other.scores is not None
                near = [np.frombuffer(s.chosen, np.float32) for s in (one.scores, other.scores)]
                np.testing.assert_allclose(near[0], near[1], atol=TOLERANCE)


def test_prompt_scores_are_those_of_the_cpu(device: Host, cpu: Host) -> None:
    prompt = some_tokens(20, vocab=VOCAB)
    found = []
    for host in (device, cpu):
        row = make_row(1, host.grant(1, 32), prompt, 0, 20, sampling=GREEDY)
        [result] = host.run(replace(row, score_from=0, score_width=2))
        assert result.prompt_scores is not None
        found.append(np.frombuffer(result.prompt_scores.chosen, np.float32))
    np.testing.assert_allclose(found[0], found[1], atol=TOLERANCE)


def test_pages_are_in_the_memory_of_the_place_and_headers_in_the_file(device: Host) -> None:
    form = device.store.file.superblock.form
    assert form.place == device.engine.device.place != IN_FILE
    assert device.store.file.path.stat().st_size == form.pages_offset
    table = device.grant(1, 16)
    device.run(make_row(1, table, some_tokens(16, vocab=VOCAB), 0, 16))
    pages = device.pool.pages.memory.view(form.page_count, form.page_bytes)
    assert bool(pages[int(table[0])].any())
    with pytest.raises(ValueError, match="are on interpreter"):
        _ = device.store.file.pages


def test_a_copy_outside_of_the_pool_is_an_error_before_any_write(device: Host) -> None:
    with pytest.raises(IndexError, match="outside of a pool"):
        device.run(copies=((0, 64),))


def test_a_row_is_judged_only_when_the_device_is_done(cpu: Host) -> None:
    """A lease that is revoked while the device still works gives no tokens."""

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(HOST, name)

        def finish(self) -> None:
            cpu.store.file.headers.set_lease_word(1, 99)

    executor = ModelExecutor(cpu.engine.decoder, cpu.engine.model.layout, Slow())
    executor.use(WorkerPool.attach(cpu.opened, cpu.engine.model.layout))
    row = make_row(1, cpu.grant(1, 16), some_tokens(9, vocab=VOCAB), 0, 9, sampling=GREEDY)
    assert executor.run(StepPlan(1, (row,))).rows[0].revoked
    executor.close()


def test_a_pool_whose_memory_has_not_come_or_that_is_elsewhere_is_not_used(
    device: Host, cpu: Host
) -> None:
    layout = device.engine.model.layout
    with pytest.raises(Stale, match="not the pool"):
        WorkerPool.attach(device.opened, layout)
    with pytest.raises(Stale, match="not the pool"):
        WorkerPool.attach(cpu.opened, layout, device.box)
    assert device.engine.maker is not None
    path = device.store.file.path.parent / "other.memory"
    other = MemoryBox(device.engine.maker, path)
    with pytest.raises(Gone, match="has not come"):
        WorkerPool.attach(device.opened, layout, other)
    other.close()


def test_a_pool_is_let_go_once_it_was_discarded(device: Host, cpu: Host) -> None:
    assert device.box is not None
    for host in (device, cpu):
        assert not host.executor.let_go_discarded()
    prompt = some_tokens(5, vocab=VOCAB)
    row = make_row(1, device.grant(1, 16), prompt, 0, 5)
    assert not device.run(row)[0].revoked
    device.memory.make(replace(device.store.facts, incarnation=7), "w")
    assert device.box.is_discarded
    assert not device.run(row)[0].revoked, "until the step thread lets go"
    assert device.executor.let_go_discarded()
    assert not device.box.is_discarded and not device.executor.let_go_discarded()
    with pytest.raises(RuntimeError, match="before any pool"):
        device.run(row)
    with pytest.raises(Gone, match="has not come"):
        device.executor.use_opened(device.opened)


def test_with_its_pool_an_engine_lets_go_of_all_of_the_memory(device: Host) -> None:
    gc.collect()
    (old,) = memories()
    gc.disable()  # in a worker without work it would not come either
    try:
        forked(device, GREEDY)
        del device.pool, device._pages
        device.memory.make(replace(device.store.facts, incarnation=7), "w")
        assert device.executor.let_go_discarded()
        assert old not in memories()
    finally:
        gc.enable()


def test_the_same_weights_in_another_type_are_another_root(folder: Path) -> None:
    config = settings_for(folder, "interpreter")
    whole, half = open_engine(config), open_engine(replace(config, dtype="bfloat16"))
    host = open_engine(settings_for(folder, "cpu"))
    assert whole.model.root == host.model.root != half.model.root
    assert whole.model.pool_spec.place != host.model.pool_spec.place


def test_a_checkpoint_in_half_precision_is_computed_with_in_it_and_named_as_if_asked_for(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    file = str(tmp_path / "model" / "model.safetensors")
    save_file({name: one.bfloat16() for name, one in load_file(file).items()}, file)
    config = settings_for(tmp_path, "interpreter")
    found = open_engine(config)
    asked = open_engine(replace(config, dtype="bfloat16", kv_dtype="bfloat16"))
    whole = open_engine(replace(config, dtype="float32"))
    assert found.model.layout.dtype == "bfloat16"
    assert found.model.root == asked.model.root != whole.model.root
    on_cpu = settings_for(tmp_path, "cpu")
    told = replace(on_cpu, dtype="float32", kv_dtype="float32")
    assert open_engine(on_cpu).model.root == open_engine(told).model.root == whole.model.root


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_cuda_is_refused_in_one_line_that_says_what_to_do(folder: Path) -> None:
    with pytest.raises(ConfigError, match="use --device cpu") as caught:
        open_engine(settings_for(folder, "cuda"))
    assert "\n" not in str(caught.value)
