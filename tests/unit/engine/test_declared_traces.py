"""A worker that declares its leases says whose trace each belongs to."""

from __future__ import annotations

import threading

import pytest
from tests.unit.engine.harness import some_tokens
from tests.unit.engine.models import VOCAB
from tests.unit.engine.worker_mesh import Mesh, make_submit, mesh, model_folder

from pagemesh.engine.executor import ModelExecutor
from pagemesh.engine.worker.plan import StepPlan, StepResult
from pagemesh.runtime import trace
from pagemesh.wire.messages import Message
from pagemesh.wire.pager_messages import Declare, Declared, DeclareWanted, Heartbeat

__all__ = ["mesh", "model_folder"]


async def test_a_pager_that_asks_what_is_held_hears_of_traces(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that an audit names them after the pager was restarted."""
    declared: list[Declare] = []
    heard = threading.Event()
    answer, compute = mesh.pager._answer, ModelExecutor.run

    def asks(message: Message) -> Message:
        match message:
            case Heartbeat():
                return DeclareWanted(epoch=1)
            case Declare():
                declared.append(message)
                if message.leases:
                    heard.set()
                return Declared(lost=[])
            case _:
                return answer(message)

    def slowly(self: ModelExecutor, plan: StepPlan) -> StepResult:
        heard.wait(10)  # so that it is not over before
        return compute(self, plan)

    monkeypatch.setattr(mesh.pager, "_answer", asks)
    monkeypatch.setattr(ModelExecutor, "run", slowly)
    context = trace.new_trace()
    async with mesh.worker("decode", "solo"):
        with trace.use(context):
            await mesh.submit("solo", make_submit(some_tokens(30, vocab=VOCAB)))
        await mesh.until(heard.is_set)
    lines = [line for message in declared for line in message.leases]
    assert {line.trace for line in lines} == {f"{context.trace_id:032x}"}
    assert {line.tokens_max for line in lines} == {30 + 19}
