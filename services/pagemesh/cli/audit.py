"""``pagemesh audit``: does what pagers, workers and tickets say of leases and pages add up?"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click
import msgspec

from pagemesh.cli.operator import ASK_TIMEOUT_MS, Mesh, bus_config, bus_flags, connected
from pagemesh.cli.reconcile import Finding, Look, reconcile
from pagemesh.cli.words import counted
from pagemesh.runtime.rpc import call
from pagemesh.wire import subjects
from pagemesh.wire.errors import Absent, Fault, NoCapacity
from pagemesh.wire.pager_reports import InspectPager, InspectWorker, PagerReport, WorkerReport

_BETWEEN_S = 1.5
"""Longer than what is under way between a worker and its pager takes, faults aside."""
_STILL_SILENT_MS = 2_000
"""For who has been silent for ``ASK_TIMEOUT_MS`` before."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="JSON.")
@bus_flags
def audit(as_json: bool, **arguments: Any) -> int:
    """Compare the books of pagers with what workers hold. Exits 1 when something does not add up,
    and names the owner and the trace of each orphan."""
    looks = asyncio.run(_look_twice(arguments))
    findings = [found for first, second in looks for found in reconcile(first, second)]
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(_entries(looks, findings))).decode())
    else:
        for _, second in looks:
            click.echo(_summary(second))
        for finding in findings:
            click.echo(finding.text)
    return 1 if findings else 0


async def _look_twice(arguments: Mapping[str, object]) -> list[tuple[Look, Look]]:
    async with connected(bus_config(arguments)) as mesh:
        hosts = [pager.host for pager in mesh.pagers]
        first = [await _look(mesh, host) for host in hosts]
        await asyncio.sleep(_BETWEEN_S)
        return [(look, await _look(mesh, look.pager.host, look.silent)) for look in first]


async def _look(mesh: Mesh, host: str, silent_before: frozenset[str] = frozenset()) -> Look:
    """What everybody of ``host`` says now; who was silent before may have lost its session
    meanwhile, and is asked all the same. Raises ``NoCapacity`` for more leases than a report
    holds."""
    report = await call(
        mesh.bus, subjects.pager_report(host), InspectPager(), PagerReport,
        timeout_ms=ASK_TIMEOUT_MS,
    )  # fmt: skip
    if len(report.leases) < report.lease_count:
        raise NoCapacity(
            f"{host} has {report.lease_count} leases, an audit compares {len(report.leases)}; "
            "try again under less load"
        )
    announced = {worker.name for worker in mesh.workers if worker.host == host}
    names = sorted(announced.union(report.workers, silent_before))  # the frozen announce nothing
    asked = [
        call(
            mesh.bus, subjects.worker_report(name), InspectWorker(), WorkerReport,
            timeout_ms=_STILL_SILENT_MS if name in silent_before else ASK_TIMEOUT_MS,
        )
        for name in names
    ]  # fmt: skip
    answers = await asyncio.gather(*asked, return_exceptions=True)
    workers, silent = [], set()
    for name, answer in zip(names, answers, strict=True):
        if isinstance(answer, WorkerReport):
            workers.append(answer)
        elif isinstance(answer, Absent) and name not in announced:
            continue
        elif isinstance(answer, Fault):
            silent.add(name)
        else:
            raise answer
    return Look(report, tuple(workers), frozenset(silent))


def _summary(look: Look) -> str:
    pager = look.pager
    silent = f", {len(look.silent)} silent" if look.silent else ""
    return (
        f"{pager.host}: {counted(pager.total_pages, 'page')}, "
        f"{counted(pager.lease_count, 'lease')}, {counted(pager.ticket_count, 'ticket')}, "
        f"{counted(len(look.workers), 'worker')}{silent}"
    )


def _entries(looks: list[tuple[Look, Look]], findings: list[Finding]) -> dict[str, object]:
    hosts = [
        {
            "host": look.pager.host,
            "total_pages": look.pager.total_pages,
            "leases": look.pager.lease_count,
            "tickets": look.pager.ticket_count,
            "workers": len(look.workers),
            "silent": sorted(look.silent),
        }
        for _, look in looks
    ]
    found = [asdict(finding) | {"lease": f"{finding.lease:x}"} for finding in findings]
    return {"hosts": hosts, "findings": found}
