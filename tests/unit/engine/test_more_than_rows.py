"""A real worker with fewer rows than sequences: all get on, and nobody's tokens are others'."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import replace
from operator import sub
from pathlib import Path

import pytest
from tests.unit.engine.harness import some_tokens
from tests.unit.engine.models import VOCAB
from tests.unit.engine.test_worker_actor import greedy_tokens
from tests.unit.engine.worker_mesh import Mesh, make_submit, mesh, model_folder

from pagemesh.engine.executor import ModelExecutor
from pagemesh.engine.worker import admission
from pagemesh.engine.worker.batching import PASSED_MAX
from pagemesh.engine.worker.desk import Desk
from pagemesh.engine.worker.plan import Ahead, StepPlan, StepResult
from pagemesh.engine.worker.sequence import Sequence
from pagemesh.wire.work_messages import Sampling

__all__ = ["mesh", "model_folder"]

ROWS, STREAMS, TOKENS = 2, 5, 100
SAMPLING = Sampling(temperature=0.0, max_tokens=TOKENS)
REQUESTS = [f"{number:032x}" for number in range(1, STREAMS + 1)]


@pytest.mark.parametrize("handed_over", [False, True])
async def test_more_streams_than_rows_all_get_on_and_draw_what_they_draw_alone(
    mesh: Mesh, model_folder: Path, monkeypatch: pytest.MonkeyPatch, handed_over: bool
) -> None:
    all_here = threading.Event()
    steps: dict[ModelExecutor, list[set[str]]] = defaultdict(list)
    compute, enter = ModelExecutor.run_on, admission.enter
    entered: list[str] = []

    def together(self: ModelExecutor, plan: StepPlan, ahead: Ahead) -> StepResult:
        """Nobody draws a second token before all are there."""
        assert len(plan.rows) <= ROWS
        assert not plan.drawing_rows or all_here.wait(20)
        result = compute(self, plan, ahead)
        steps[self] += [{row.key.request for row in plan.rows}] * len(result.took_us)
        return result

    def counted(desk: Desk, sequence: Sequence) -> None:
        enter(desk, sequence)
        entered.append(sequence.key.request)
        if len(entered) == STREAMS * (1 + handed_over):
            all_here.set()

    monkeypatch.setattr(ModelExecutor, "run_on", together)
    monkeypatch.setattr(admission, "enter", counted)
    limits = replace(mesh.config.worker, sequence_count_max=ROWS, page_size=64, draft_tokens_max=0)
    mesh.config = replace(mesh.config, worker=limits)
    prompts = [some_tokens(10 + place, vocab=VOCAB)[place:] for place in range(STREAMS)]
    async with mesh.worker("prefill", "first"), mesh.worker("decode", "second"):
        for place, (request, prompt) in enumerate(zip(REQUESTS, prompts, strict=True)):
            message = make_submit(
                prompt, request=request, arrival_us=1 + place, sampling=SAMPLING,
                decode="second" if handed_over else None,
            )  # fmt: skip
            await mesh.submit("first" if handed_over else "second", message)
        await mesh.until(lambda: sum(bool(frame.finish) for frame in mesh.frames) == STREAMS)
        await mesh.until(lambda: not mesh.pager.held)
    drawing = max(steps.values(), key=len)
    for request, prompt in zip(REQUESTS, prompts, strict=True):
        turns = [place for place, going in enumerate(drawing) if request in going]
        assert turns[0] < TOKENS - 2, "before the first have ended"
        assert max(map(sub, turns[1:], turns)) <= PASSED_MAX + STREAMS
        assert mesh.tokens(request=request) == greedy_tokens(model_folder, prompt, TOKENS)
