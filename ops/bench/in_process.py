"""The worker loop without the mesh: the same scheduler, pager core, pool file and executor,
called directly in one process and on one thread. What the mesh adds is measured against it.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from ops.bench.run import Run

from pagemesh.engine.executor import ModelExecutor
from pagemesh.engine.forward import Decoder
from pagemesh.engine.loading import load_model
from pagemesh.engine.worker import events as work
from pagemesh.engine.worker.core import WorkerCore
from pagemesh.engine.worker.plan import Ahead, StepPlan, StepResult, plan_after
from pagemesh.engine.worker.settings import RoleSettings, WorkerIdentity, WorkerLimits
from pagemesh.engine.worker.stepper import bounded_threads
from pagemesh.pager import events as paging
from pagemesh.pager.eviction import make_policy
from pagemesh.pager.limits import PagerLimits
from pagemesh.pager.state import PagerCore
from pagemesh.pager.storage.pool_store import PoolStore
from pagemesh.runtime.garbage import spare_loaded
from pagemesh.runtime.ids import new_request_id, new_ticket_id
from pagemesh.runtime.settings import PagerConfig, WorkerConfig
from pagemesh.wire.identity import tenant_root
from pagemesh.wire.tokens import pack
from pagemesh.wire.work_messages import ChoiceStart, Sampling, Submit

STEP_TOKENS_MAX = 512
DEADLINE_MS = 600_000
STREAM_S = WorkerConfig().stream_ms / 1e3


class InProcess:
    """A worker that prefills and decodes, and its pager, driven by plain calls."""

    def __init__(self, model: Path, folder: Path, *, deterministic: bool = False) -> None:
        torch.set_num_threads(bounded_threads(0))
        loaded = load_model(model, name="bench", page_size=16, cache=folder / "prepared")
        spec = loaded.pool_spec
        self._store = PoolStore.create(folder, "bench", spec, 256 << 20)
        self._pager = PagerCore(
            PagerLimits(),
            self._store.facts,
            make_policy(PagerConfig().eviction, self._store.facts.page_count),
        )
        role = RoleSettings("decode", False, STEP_TOKENS_MAX, STEP_TOKENS_MAX)
        limits = WorkerLimits(context_tokens_max=loaded.config.context_tokens_max)
        who = WorkerIdentity("bench", 1, "worker-bench", spec, loaded.root)
        self._worker = WorkerCore(who, role, limits, new_ticket_id)
        decoder = Decoder(loaded.config, loaded.weights, deterministic=deterministic)
        self._executor = ModelExecutor(decoder, loaded.layout)
        self._root, self._model_root = tenant_root(loaded.root, b""), loaded.root
        self._events: deque[work.Event] = deque()
        self._run = Run()
        self._started_s = 0.0
        self._ended = False
        self._end_run = np.zeros(1, np.uint32)
        self._feed(work.PagerChanged(self._store.facts.epoch))
        self._feed(work.Tick())
        spare_loaded()  # as services do

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._executor.close()
        self._store.close()

    def generate(self, prompt: list[int], output_tokens: int) -> Run:
        """Run one request by itself, greedily. Raises ``RuntimeError`` when it is refused."""
        self._run, self._ended = Run(), False
        self._started_s = time.perf_counter()
        submit = Submit(
            request=new_request_id(), attempt=1, gateway="bench", gateway_incarnation=1,
            priority=0, arrival_us=time.monotonic_ns() // 1_000, root=self._root,
            model_root=self._model_root,
            prompt=pack(prompt), choices=[ChoiceStart(choice=0)],
            sampling=Sampling(temperature=0.0, max_tokens=output_tokens),
            deadline_ms=DEADLINE_MS,
        )  # fmt: skip
        self._feed(work.Received(1, submit))
        while not self._ended:
            self._feed(work.Tick())
        return self._run

    def _feed(self, event: work.Event) -> None:
        self._events.append(event)
        while self._events:
            self._handle(self._events.popleft())

    def _handle(self, event: work.Event) -> None:
        for command in self._worker.handle(event, time.monotonic_ns() / 1e6):
            self._perform(command)

    def _perform(self, command: work.Command) -> None:
        match command:
            case work.CallPager():
                self._ask(command)
            case work.RunStep():
                self._run_steps(command.plan)
            case work.EndRun():
                self._end_run[0] = 1
            case work.UsePool():
                self._executor.use_opened(command.opened)
            case work.SendFrames():
                self._take(command)
            case _:
                pass

    def _run_steps(self, first: StepPlan) -> None:
        """Compute a plan and the rest of its run, and report them, as ``Stepper`` does."""
        self._end_run[0] = 0
        plan: StepPlan | None = first
        results: list[StepResult] = []
        due_s = 0.0
        while plan is not None:
            for_us = 1e6 * (due_s - time.perf_counter())
            result = self._executor.run_on(plan, Ahead(for_us, self._end_run, ()))
            results.append(result)
            plan = None if self._end_run[0] else plan_after(plan, result)
            if plan is not None and time.perf_counter() >= due_s:
                due_s = time.perf_counter() + STREAM_S
                self._handle(work.StepsFinished(tuple(results), goes_on=True))
                results.clear()
        self._events.append(work.StepsFinished(tuple(results)))

    def _ask(self, call: work.CallPager) -> None:
        asked = paging.Asked(call.call_id, call.message)
        for command in self._pager.handle(asked, time.monotonic_ns() // 1_000_000):
            if self._store.perform(command):
                continue
            if isinstance(command, paging.Answer):
                self._events.append(work.PagerAnswered(call.call_id, command.message))

    def _take(self, command: work.SendFrames) -> None:
        now_s = time.perf_counter() - self._started_s
        for frame in command.frames.frames:
            if frame.error is not None:
                raise RuntimeError(f"{frame.error.code}: {frame.error.message}")
            count = len(frame.tokens) // 4
            self._run.times_s += [now_s] * count
            self._ended = self._ended or frame.finish is not None
