"""A worker process's parts, joined over a real NATS server: from submit to frames."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from tests.unit.engine.harness import Pages, load_decoder, logits_in_chunks, some_tokens
from tests.unit.engine.models import VOCAB
from tests.unit.engine.worker_mesh import (
    REQUEST,
    Mesh,
    make_admit,
    make_submit,
    mesh,
    model_folder,
)

from pagemesh.decode.role import role_settings as decode_role
from pagemesh.engine import forward
from pagemesh.engine.executor import ModelExecutor
from pagemesh.engine.model import Rope
from pagemesh.engine.worker import service
from pagemesh.engine.worker.plan import StepPlan, StepResult
from pagemesh.engine.worker.preemptions import remedy
from pagemesh.engine.worker.service import run_worker
from pagemesh.kernels.native.locks import holder_is_dead
from pagemesh.pager.leases.states import RevokeReason
from pagemesh.runtime import rpc, trace
from pagemesh.runtime.bus.nats_client import DirectClient
from pagemesh.runtime.service import Stop
from pagemesh.runtime.settings import WorkerConfig
from pagemesh.runtime.spans import set_up_spans
from pagemesh.wire import codec, subjects
from pagemesh.wire.errors import ConfigError, Malformed, NoCapacity
from pagemesh.wire.messages import Ok, SequenceKey
from pagemesh.wire.pager_messages import AskedAs
from pagemesh.wire.tokens import U32, pack
from pagemesh.wire.work_messages import Abort, Accepted, ChoiceStart, Sampling

__all__ = ["mesh", "model_folder"]


def locks_in(folder: Path) -> list[Path]:
    return list(folder.glob("worker-*.lock"))


def test_more_pages_are_advised_to_who_lost_some_for_want_of_them_alone() -> None:
    advised = {reason for reason in get_args(RevokeReason) if "POOL_BYTES" in remedy(reason)}
    assert advised == {"preempted"}


def greedy_tokens(folder: Path, prompt: U32, count: int) -> list[int]:
    """What the model says, computed without a worker."""
    decoder, pool = load_decoder(folder)
    tokens = prompt
    table = Pages(pool).table(len(prompt) + count)
    for _ in range(count):
        logits = logits_in_chunks(decoder, pool, table, tokens, [len(tokens)])
        tokens = np.append(tokens, np.uint32(logits[-1].argmax()))
    return [int(token) for token in tokens[len(prompt) :]]


async def test_a_worker_is_ready_when_its_pool_is(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device may take seconds to prepare for a pool."""
    asked, prepared = threading.Event(), threading.Event()
    use_opened = ModelExecutor.use_opened

    def slow(executor: ModelExecutor, opened: Any) -> None:
        asked.set()
        assert prepared.wait(20)
        use_opened(executor, opened)

    monkeypatch.setattr(ModelExecutor, "use_opened", slow)
    started = asyncio.create_task(anext(mesh_worker := started_worker(mesh)))
    await mesh.until(asked.is_set)
    await asyncio.sleep(0.3)
    assert "solo" not in mesh.ready or mesh.ready["solo"].state == "starting"
    prepared.set()
    await started
    assert mesh.ready["solo"].state == "ready"
    await mesh_worker.aclose()


async def started_worker(mesh: Mesh) -> AsyncGenerator[None]:
    async with mesh.worker("decode", "solo"):
        yield


async def test_a_submitted_prompt_comes_back_as_frames(mesh: Mesh, model_folder: Path) -> None:
    prompt = some_tokens(600, vocab=VOCAB)[:450]
    async with mesh.worker("decode", "solo"):
        accepted = await mesh.submit("solo", make_submit(prompt))
        assert accepted.incarnation == mesh.ready["solo"].incarnation
        await mesh.until(mesh.finished)
        await mesh.until(lambda: not mesh.pager.held)
    assert mesh.tokens() == greedy_tokens(model_folder, prompt, 20)
    assert mesh.frames[-1].finish == "length"
    facts = mesh.ready["solo"].model
    assert facts is not None
    assert (facts.model, facts.pool_pages, facts.deterministic) == ("tiny", 128, True)


async def test_prefill_hands_over_to_decode_without_changing_a_token(
    mesh: Mesh, model_folder: Path
) -> None:
    prompt = some_tokens(75, vocab=VOCAB)
    async with mesh.worker("prefill", "first"), mesh.worker("decode", "second"):
        await mesh.submit("first", make_submit(prompt, decode="second"))
        await mesh.until(mesh.finished)
        await mesh.until(lambda: not mesh.pager.held)
    assert mesh.tokens() == greedy_tokens(model_folder, prompt, 20)
    asked = [name for name in mesh.pager.asked if name in ("Admit", "Offer", "Redeem")]
    assert asked == ["Admit", "Offer", "Redeem"]


async def test_choices_are_drawn_each_with_its_own_seed(mesh: Mesh) -> None:
    hot = Sampling(temperature=2.0, seed=3, max_tokens=1, logprobs=2)
    choices = [ChoiceStart(choice=index) for index in range(4)]
    async with mesh.worker("decode", "solo"):
        prompt = some_tokens(40, vocab=VOCAB)
        await mesh.submit("solo", make_submit(prompt, sampling=hot, choices=choices))
        await mesh.until(lambda: all(mesh.finished(choice) for choice in range(4)))
    assert len({tuple(mesh.tokens(choice)) for choice in range(4)}) > 1
    assert all(frame.logprobs is not None for frame in mesh.frames)


async def test_what_a_step_has_to_tell_the_pager_is_told_in_one_write(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write wakes the bus, and that the pager, on the cores that the next step wants."""
    told: list[int] = []
    hand_over = DirectClient.hand_over

    def count(client: DirectClient) -> None:
        told.append(sum(f" {subjects.pager('here')} ".encode() in one for one in client._pending))
        hand_over(client)

    monkeypatch.setattr(DirectClient, "hand_over", count)
    greedy = Sampling(temperature=0.0, max_tokens=4)
    choices = [ChoiceStart(choice=index) for index in range(4)]
    async with mesh.worker("decode", "solo"):
        prompt = some_tokens(40, vocab=VOCAB)
        await mesh.submit("solo", make_submit(prompt, sampling=greedy, choices=choices))
        await mesh.until(lambda: all(mesh.finished(choice) for choice in range(4)))
        await mesh.until(lambda: not mesh.pager.held)
    assert max(told) > 1, "a step after which several leases change tells each by itself"


async def test_a_revoked_sequence_goes_on_with_the_same_tokens(
    mesh: Mesh, model_folder: Path
) -> None:
    prompt = some_tokens(30, vocab=VOCAB)
    sampling = Sampling(temperature=0.0, max_tokens=60)
    async with mesh.worker("decode", "solo"):
        await mesh.submit("solo", make_submit(prompt, sampling=sampling))
        await mesh.until(lambda: mesh.frames)
        key = SequenceKey(request=REQUEST, attempt=1, choice=0)
        mesh.pager.revoke("solo", 1, key)
        await mesh.until(mesh.finished)
    assert mesh.tokens() == greedy_tokens(model_folder, prompt, 60)
    assert "AckRevoke" in mesh.pager.asked
    assert mesh.pager.asked.count("Admit") == 2


async def test_tokens_outside_the_vocabulary_are_refused_by_name(mesh: Mesh) -> None:
    async with mesh.worker("decode", "solo"):
        for wrong, field in (
            (make_submit(np.array([VOCAB], np.uint32)), "prompt"),
            (make_submit(some_tokens(3, vocab=VOCAB),
                         choices=[ChoiceStart(choice=0, generated=pack([VOCAB + 9]))]),
             "generated"),
        ):  # fmt: skip
            with pytest.raises(Malformed, match=field):
                await mesh.submit("solo", wrong)
        with pytest.raises(Malformed):
            mesh.bus.publish(subjects.worker("solo"), b"\x00garbage")
            await rpc.call(mesh.bus, subjects.worker("solo"), Ok(), Accepted, timeout_ms=2_000)


async def test_prompt_scores_that_no_message_can_carry_are_refused_at_once(mesh: Mesh) -> None:
    wanted = make_submit(
        some_tokens(2000, vocab=VOCAB), prompt_logprobs=True,
        sampling=Sampling(max_tokens=1, logprobs=20),
        choices=[ChoiceStart(choice=index) for index in range(100)],
    )  # fmt: skip
    async with mesh.worker("decode", "solo"):
        with pytest.raises(NoCapacity, match="log-probabilities take 32800000 bytes"):
            await mesh.submit("solo", wanted)


async def test_a_scored_prompt_brings_a_score_for_every_token_but_the_first(mesh: Mesh) -> None:
    scoring = Sampling(max_tokens=0, logprobs=2)
    prompt = some_tokens(700, vocab=VOCAB)[:300]
    async with mesh.worker("decode", "solo"):
        await mesh.submit("solo", make_submit(prompt, sampling=scoring, prompt_logprobs=True))
        await mesh.until(mesh.finished)
    (scores,) = [frame.prompt_logprobs for frame in mesh.frames if frame.prompt_logprobs]
    assert (len(scores.chosen), scores.width) == (4 * 299, 2)
    assert (np.frombuffer(scores.chosen, np.float32) <= 0).all()


async def test_a_long_step_holds_up_neither_aborts_nor_presence(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[float] = []
    compute = ModelExecutor.run

    def slowly(self: ModelExecutor, plan: StepPlan) -> StepResult:
        began.append(time.monotonic())
        time.sleep(0.6)
        return compute(self, plan)

    monkeypatch.setattr(ModelExecutor, "run", slowly)
    async with mesh.worker("decode", "solo"):
        await mesh.submit("solo", make_submit(some_tokens(5, vocab=VOCAB)))
        await mesh.until(lambda: began)
        asked = time.monotonic()
        abort = Abort(request=REQUEST, attempt=1, reason="client")
        await rpc.call(mesh.bus, subjects.worker("solo"), abort, Ok, timeout_ms=2_000)
        assert time.monotonic() - asked < 0.3
        await mesh.until(lambda: not mesh.pager.held)
        assert time.monotonic() - began[0] >= 0.6, "pages of a running step were given back"
    assert mesh.tokens() == []


async def test_a_worker_holds_its_lock_for_as_long_as_it_lives(mesh: Mesh, pool_dir: Path) -> None:
    async with mesh.worker("prefill", "first"):
        (lock,) = locks_in(pool_dir)
        assert not holder_is_dead(lock)
    assert holder_is_dead(lock)
    assert mesh.ready["first"].state == "leaving"


async def test_draining_finishes_what_was_accepted(mesh: Mesh) -> None:
    async with mesh.worker("decode", "solo"):
        await mesh.submit("solo", make_submit(some_tokens(30, vocab=VOCAB)))
    assert len(mesh.tokens()) == 20
    assert mesh.finished()
    assert not mesh.pager.held


async def test_a_model_is_made_ready_off_the_event_loop(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers: list[threading.Thread] = []
    make = forward.rotation_tables

    def watched(rope: Rope, position_count: int) -> Any:
        makers.append(threading.current_thread())
        return make(rope, position_count)

    monkeypatch.setattr(forward, "rotation_tables", watched)
    async with mesh.worker("decode", "solo"):
        assert makers
        assert threading.main_thread() not in makers


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "float16"}, "PAGEMESH_DTYPE=float16"),
        ({"deterministic": True, "device": "cuda"}, "PAGEMESH_DETERMINISTIC"),
    ],
)
async def test_settings_that_are_not_supported_are_named(
    mesh: Mesh, changes: dict[str, Any], named: str
) -> None:
    worker = replace(mesh.config.worker, **changes)
    with pytest.raises(ConfigError, match=named):
        await run_worker(replace(mesh.config, worker=worker), Stop(), decode_role(worker))


async def test_a_worker_that_is_to_stop_does_not_load_its_model_first(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, codes, stop = threading.Event(), list[int](), Stop()
    begun = threading.Event()

    def slow(_config: WorkerConfig) -> None:
        begun.set()
        loads.wait(20)

    monkeypatch.setattr(service, "load", slow)
    monkeypatch.setattr(os, "_exit", codes.append)
    config = replace(mesh.config, host=replace(mesh.config.host, name="slow"))
    task = asyncio.create_task(run_worker(config, stop, decode_role(config.worker)))
    try:
        await asyncio.to_thread(begun.wait, 20)
        stop.request()
        async with asyncio.timeout(10):
            await task
        assert codes == [0], "at once, since the thread that loads cannot be ended"
    finally:
        loads.set()


async def test_a_model_that_is_not_there_ends_the_worker_by_name(mesh: Mesh) -> None:
    worker = replace(mesh.config.worker, model="/nowhere")
    config = replace(mesh.config, worker=worker, host=replace(mesh.config.host, name="solo"))
    with pytest.raises(ExceptionGroup) as caught:
        await run_worker(config, Stop(), decode_role(worker))
    (error,) = caught.value.exceptions
    assert isinstance(error, ConfigError)
    assert "/nowhere" in str(error)


async def test_pages_that_its_gateway_asked_for_come_in_its_trace(
    mesh: Mesh, model_folder: Path, trace_receiver: Any
) -> None:
    telemetry = replace(mesh.config.telemetry, otlp=trace_receiver.url)
    prompt = some_tokens(20, vocab=VOCAB)
    with set_up_spans(telemetry, service="test", name="test"):
        async with mesh.worker("decode", "first"):
            incarnation = mesh.ready["first"].incarnation
            asked_as = AskedAs(incarnation=incarnation, epoch=1)
            with trace.use(trace.new_trace()):
                await mesh.submit("first", make_submit(prompt, asked_as=asked_as))
            admit = make_admit(prompt, "first", incarnation)
            where = subjects.pager(mesh.pager.host), subjects.worker("first")
            mesh.bus.publish(where[0], codec.encode(admit), reply=where[1])
            await mesh.until(mesh.finished)
            await mesh.until(lambda: not mesh.pager.held)
    assert mesh.tokens() == greedy_tokens(model_folder, prompt, 20)
    assert mesh.pager.asked.count("Admit") == 1
    spans = trace_receiver.spans
    (own,) = [span for span in spans if span.name == "decode sequence"]
    (admitted,) = [span for span in spans if span.name == "admit"]
    assert admitted.parent_id == own.span_id
    assert admitted.attributes["pagemesh.tokens.available"] == 3


@pytest.mark.parametrize("queues", [False, True])
async def test_one_trace_runs_through_both_workers_with_one_span_for_each_wait(
    mesh: Mesh, trace_receiver: Any, queues: bool
) -> None:
    mesh.pager.queues = queues
    telemetry = replace(mesh.config.telemetry, otlp=trace_receiver.url)
    parent = trace.new_trace()
    with set_up_spans(telemetry, service="test", name="test"):
        async with mesh.worker("prefill", "first"), mesh.worker("decode", "second"):
            with trace.use(parent):
                prompt = some_tokens(75, vocab=VOCAB)
                await mesh.submit("first", make_submit(prompt, decode="second"))
            await mesh.until(mesh.finished)
            await mesh.until(lambda: not mesh.pager.held)
    spans = trace_receiver.spans
    assert [span.name for span in spans].count("queue") == 4, "before pages and steps, twice"
    assert {span.name for span in spans} >= {
        "prefill sequence", "queue", "admit", "prefill chunk", "commit", "ticket", "attach",
        "decode sequence", "redeem", "decode",
    }  # fmt: skip
    (admit,) = [span for span in spans if span.name == "admit"]
    assert admit.attributes["pagemesh.tokens.available"] == 3
    assert admit.attributes["pagemesh.tokens.lost.last_token"] == 1
    (decode,) = [span for span in spans if span.name == "decode"]
    assert decode.attributes["gen_ai.usage.output_tokens"] == 19
    assert {span.trace_id for span in spans} == {f"{parent.trace_id:032x}"}
    known = {span.span_id for span in spans} | {f"{parent.span_id:016x}"}
    assert all(span.parent_id in known for span in spans)
