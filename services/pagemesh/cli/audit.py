"""``pagemesh audit``: do the reports of pagers and workers on leases, tickets and pages agree?"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

import click
import msgspec

from pagemesh.cli.operator import (
    ASK_TIMEOUT_MS,
    Mesh,
    bus_config,
    bus_flags,
    connected,
    fault_entry,
)
from pagemesh.cli.reconcile import ONE_PAGER, Finding, Look, reconcile, two_pagers
from pagemesh.cli.words import counted
from pagemesh.runtime.rpc import call
from pagemesh.wire import subjects
from pagemesh.wire.errors import Absent, Fault, Stale
from pagemesh.wire.pager_reports import (
    InspectPager,
    InspectWorker,
    LeaseLine,
    PagerReport,
    WorkerReport,
)

Looks = list[tuple[Look, Look]]
"""The first and the second look at each host."""
Unheard = dict[str, Fault]
"""Hosts whose pager did not answer, with the fault that came instead."""
_BETWEEN_S = 1.5
"""Pause between the looks: longer than a message between a worker and its pager is in flight,
faults aside."""
_PARTS_MAX = 64
"""Limit on the parts that a pager's list of leases comes in; no pager has that many leases."""
_STILL_SILENT_MS = 2_000
"""Timeout for a worker that has already been silent for ``ASK_TIMEOUT_MS``."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@bus_flags
def audit(as_json: bool, **arguments: Any) -> int:
    """Compare the ledgers of pagers with the leases that workers hold.

    Each discrepancy is printed with its pages, owner, trace and the next step. Exits 1 if there is
    one, or if a pager does not answer; the other pagers are audited all the same.
    """
    looks, unheard = asyncio.run(_look_twice(arguments))
    findings = [found for first, second in looks for found in reconcile(first, second)]
    if as_json:
        entries = msgspec.json.encode(_entries(looks, unheard, findings))
        click.echo(msgspec.json.format(entries).decode())
    else:
        for first, second in looks:
            click.echo(_summary(first, second))
        for host, error in unheard.items():
            click.echo(f"{host}: {error}", err=True)
        for finding in findings:
            click.echo(finding.text)
        if looks and not findings:
            click.echo(_verdict(looks, unheard))
    return 1 if findings or unheard else 0


async def _look_twice(arguments: Mapping[str, object]) -> tuple[Looks, Unheard]:
    async with connected(bus_config(arguments)) as mesh:
        return await _looks(mesh)


async def _looks(mesh: Mesh) -> tuple[Looks, Unheard]:
    """Two looks at each host, and the faults of the hosts whose pager failed to answer in either
    look. One such host does not keep the others from being audited."""
    unheard: Unheard = {}

    async def look(host: str, silent_before: frozenset[str] = frozenset()) -> Look | None:
        try:
            return await _look(mesh, host, silent_before)
        except Fault as error:
            unheard[host] = error
            if len(names := _pagers_of(mesh, host)) > 1:  # whose reports do not fit together
                unheard[host] = Stale(f"{two_pagers(names)}; next: {ONE_PAGER}")
            return None

    first = [await look(host) for host in dict.fromkeys(pager.host for pager in mesh.pagers)]
    await asyncio.sleep(_BETWEEN_S)
    both = [(one, await look(one.pager.host, one.silent)) for one in first if one is not None]
    return [(one, two) for one, two in both if two is not None], unheard


async def _look(mesh: Mesh, host: str, silent_before: frozenset[str] = frozenset()) -> Look:
    """What the pager and the workers of ``host`` report now. Workers in ``silent_before`` are asked
    even if the pager has dropped their sessions since. Raises what ``_report`` raises."""
    report = await _report(mesh, host)
    announced = {worker.name for worker in mesh.workers if worker.host == host}
    names = sorted(announced.union(report.workers, silent_before))  # frozen ones do not announce
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
    return Look(report, tuple(workers), frozenset(silent), _pagers_of(mesh, host))


def _pagers_of(mesh: Mesh, host: str) -> tuple[str, ...]:
    """The pagers that serve ``host``: one, if all is well."""
    there = (one for one in mesh.pagers if one.host == host and one.state != "draining")
    return tuple(one.name for one in there)


async def _report(mesh: Mesh, host: str) -> PagerReport:
    """The pager's report with all of its leases, fetched in parts. Raises ``Fault`` when the pager
    does not answer or restarted between two parts."""
    whole: PagerReport | None = None
    leases: list[LeaseLine] = []
    for _ in range(_PARTS_MAX):
        part = await call(
            mesh.bus, subjects.pager_report(host),
            InspectPager(after=leases[-1].lease if leases else 0), PagerReport,
            timeout_ms=ASK_TIMEOUT_MS,
        )  # fmt: skip
        whole = whole or part
        if part.epoch != whole.epoch:
            raise Stale(f"the pager of {host} restarted meanwhile; run the audit again")
        leases += part.leases
        if not part.more or not part.leases:
            break
    assert whole is not None
    return msgspec.structs.replace(whole, leases=leases)


def _summary(first: Look, second: Look) -> str:
    """The counts of the second look, and the workers that were silent in either: one that was
    silent in the first may be gone by the second."""
    pager, names = second.pager, _silent(first, second)
    silent = f"; no answer from {', '.join(names)}" if names else ""
    return (
        f"{pager.host}: {counted(pager.total_pages, 'page')}, "
        f"{counted(pager.lease_count, 'lease')}, {counted(pager.ticket_count, 'ticket')}, "
        f"{counted(len(second.workers), 'worker')}{silent}"
        + ("" if pager.are_pins_counted else "; pins not counted, too much is in use: look later")
    )


def _silent(first: Look, second: Look) -> list[str]:
    return sorted(first.silent | second.silent)


def _verdict(looks: Looks, unheard: Collection[str] = ()) -> str:
    """The verdict when there are no findings. It covers only what was reported if a worker was
    silent in either look, since findings about leases need both, or if the second look counted no
    pins."""
    parts = any(_silent(*both) or not both[1].pager.are_pins_counted for both in looks)
    return "what was told adds up" if parts or unheard else "all of it adds up"


def _entries(looks: Looks, unheard: Unheard, findings: list[Finding]) -> dict[str, object]:
    hosts: list[dict[str, object]] = [
        {
            "host": look.pager.host,
            "total_pages": look.pager.total_pages,
            "leases": look.pager.lease_count,
            "tickets": look.pager.ticket_count,
            "workers": len(look.workers),
            "silent": _silent(first, look),
            "pins_counted": look.pager.are_pins_counted,
        }
        for first, look in looks
    ]
    hosts += [fault_entry(host, error) for host, error in unheard.items()]
    found = [asdict(finding) | {"lease": f"{finding.lease:x}"} for finding in findings]
    return {"hosts": hosts, "findings": found}
