"""What a pager says no with tells what to do next, in one line."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.unit.pager.rig import Rig, Worker, fill_of

import pagemesh.pager
from pagemesh.wire.errors import Fault
from pagemesh.wire.messages import Refused

FOLDER = Path(pagemesh.pager.__file__).parent
SOURCES = (
    "books", "door", "recovery", "leases/filling", "leases/handover", "leases/quotas",
    "retention/pins",
)  # fmt: skip


def texts(source: ast.Module) -> Iterator[str]:
    """Of each refusal that is raised there, with ``{}`` for what is put in."""
    constants = {
        target.id: node.value.value
        for node in source.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(source):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = node.exc.func.id if isinstance(node.exc.func, ast.Name) else ""
            if name in Fault.codes:
                yield "".join(_words(node.exc.args[0], constants))


def _words(text: ast.expr, constants: Mapping[str, object]) -> Iterator[str]:
    match text:
        case ast.Constant(value=str(words)):
            yield words
        case ast.JoinedStr(values=parts):
            for part in parts:
                yield from _words(part, constants)
        case ast.FormattedValue(value=ast.Name(id=name)) if name in constants:
            yield str(constants[name])
        case _:
            yield "{}"


@pytest.mark.parametrize("name", SOURCES)
def test_each_refusal_says_what_to_do_next_in_one_line(name: str) -> None:
    told = list(texts(ast.parse((FOLDER / f"{name}.py").read_text())))
    assert told
    for text in told:
        what, _, then = text.replace("; ", ": ", 1).partition(": ")
        assert what.strip() and len(then.split()) >= 2 and "\n" not in text, text


def test_a_lease_is_named_as_in_traces_and_audits(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, range(8))
    worker.release(lease)
    refused = worker.commit(lease, fill_of(range(8)))
    assert isinstance(refused, Refused)
    assert refused.message.startswith(f"lease {lease.lease:x} is not there (any more): ")
