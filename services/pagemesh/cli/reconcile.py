"""Do the reports of pagers and workers on leases and pages agree? Pure: from two looks to findings.

Grants and releases are in flight all the time, so a difference between pager and worker counts only
if both looks, some time apart, show it. What one party reports alone is judged by one look:

    pager     one serves the host
    ledger    free + held + pinned + idle + draining = all pages; each held or draining page belongs
              to a lease, or waits for a worker that has not reported since the pager started; the
              pager's own count of pages and pins by owner finds no fault
    ticket    an offered lease has a ticket that has not expired (judged by both looks)
    lease     the worker that holds a lease for the pager is there, knows the lease and counts as
              many pages; the pager knows each lease that a worker holds
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagemesh.cli.words import counted
from pagemesh.wire.pager_reports import (
    LeaseLine,
    LedgerFault,
    PagerReport,
    WorkerLease,
    WorkerReport,
)

_NEW_PAGER = "restart that pager: it counts anew from the pool, and sequences go on"
_NEW_WORKER = "restart that worker: its sequences go on elsewhere, and it then holds nothing"
ONE_PAGER = "stop all but one, or give each host a name of its own (--host)"
_WAIT = "look again in a minute; if it stays, restart that pager, which frees what nobody declares"


@dataclass(frozen=True, slots=True)
class Finding:
    """One discrepancy, and what to do about it. ``owner``, ``request`` and ``trace`` are empty if
    there is none; without a lease, ``owner`` is the last writer of the pages."""

    host: str
    what: str
    next: str
    lease: int = 0
    owner: str = ""
    request: str = ""
    trace: str = ""
    page_count: int = 0
    pages: tuple[int, ...] = ()
    """The first few of the ``page_count`` pages."""
    root: str = ""

    @property
    def text(self) -> str:
        """One line."""
        parts = [f"{self.host}: {self.what}"]
        if self.page_count:
            named = ", ".join(map(str, self.pages))
            more = ", ..." if self.page_count > len(self.pages) else ""
            parts.append(f"{counted(self.page_count, 'page')}: {named}{more}")
        if self.root:
            parts.append(self.root)
        if self.lease:
            parts.append(f"lease {self.lease:x} of {self.owner}")
            parts.append(f"request {self.request}, trace {self.trace or 'not sampled'}")
        elif self.owner:
            parts.append(f"last written by {self.owner}")
        return "; ".join([*parts, f"next: {self.next}"])


@dataclass(frozen=True, slots=True)
class Look:
    """What a pager and the workers of its host reported at one time. ``silent``: workers that did
    not answer, although they had announced themselves or the pager knows them."""

    pager: PagerReport
    workers: tuple[WorkerReport, ...]
    silent: frozenset[str] = frozenset()
    pagers: tuple[str, ...] = ()
    """The names of the pagers that announce themselves for the host."""


def reconcile(first: Look, second: Look) -> list[Finding]:
    """The discrepancies of ``second``; those that depend on timing only if ``first`` has them
    too."""
    before = set(_differences(first))
    lasting = [finding for finding in _differences(second) if finding in before]
    return [*_pagers(second), *_ledger(second.pager), *_tickets(first, second), *lasting]


def two_pagers(names: Sequence[str]) -> str:
    """What is wrong with a host that several pagers serve."""
    return f"{len(names)} pagers serve this host, and each answers all calls: {', '.join(names)}"


def _pagers(look: Look) -> Iterator[Finding]:
    if len(look.pagers) > 1:
        yield Finding(look.pager.host, two_pagers(look.pagers), ONE_PAGER)


def _ledger(pager: PagerReport) -> Iterator[Finding]:
    states = (
        pager.free_pages, pager.held_pages, pager.pinned_pages, pager.idle_pages,
        pager.draining_pages,
    )  # fmt: skip
    if sum(states) != pager.total_pages:
        what = f"{sum(states)} pages are accounted for, not {pager.total_pages}"
        yield Finding(pager.host, what, _NEW_PAGER)
    owned = pager.leased_pages + pager.unclaimed_pages
    wanted = pager.held_pages + pager.draining_pages
    if owned != wanted and not pager.faults:  # which would say more
        what = f"{wanted} pages are held or draining, {owned} have an owner"
        yield Finding(pager.host, what, _NEW_PAGER)
    if pager.offered_count != pager.ticket_count:
        what = f"{pager.ticket_count} tickets for {pager.offered_count} offered leases"
        yield Finding(pager.host, what, _NEW_PAGER)
    for fault in pager.faults:
        yield _found(pager.host, fault)


def _found(host: str, fault: LedgerFault) -> Finding:
    request = "" if fault.key is None else fault.key.request
    return Finding(
        host, fault.what, _NEW_PAGER, fault.lease, fault.owner, request, fault.trace,
        fault.page_count, tuple(fault.pages), fault.root,
    )  # fmt: skip


def _tickets(first: Look, second: Look) -> Iterator[Finding]:
    """Tickets that had expired in both looks; the pager normally ends one at its next tick."""
    over = {line.lease for line in first.pager.leases if _is_over(line)}
    for line in second.pager.leases:
        if _is_over(line) and line.lease in over:
            yield _of(second, line, "a ticket that is over still holds pages", _NEW_PAGER)


def _is_over(line: LeaseLine) -> bool:
    return line.state == "offered" and not line.expires_in_ms


def _differences(look: Look) -> Iterator[Finding]:
    known = {line.lease: line for line in look.pager.leases}
    by_incarnation = {
        report.incarnation: (report, {lease.lease: lease for lease in report.leases})
        for report in look.workers
    }
    for line in look.pager.leases:
        if line.state == "offered" or _worker(line) in look.silent:
            continue
        holder, held = by_incarnation.get(line.incarnation, (None, dict[int, WorkerLease]()))
        if holder is None:
            yield _of(look, line, "its holder is not there", _WAIT)
        elif line.lease not in held:
            if not holder.debt_count:
                yield _of(look, line, "its holder does not know it", _WAIT)
        else:
            yield from _pages(look, line, held[line.lease])
    for report in look.workers:
        for lease in report.leases:
            found = known.get(lease.lease)
            if lease.state == "held" and (found is None or found.incarnation != report.incarnation):
                yield Finding(
                    look.pager.host, "a worker uses it, but the pager does not know it",
                    _NEW_WORKER, lease.lease, report.worker, lease.key.request, lease.trace,
                )  # fmt: skip


def _pages(look: Look, line: LeaseLine, held: WorkerLease) -> Iterator[Finding]:
    """Do pager and worker count the same pages? A grant may be in flight to the worker, so the
    pager may count up to as many as the worker has asked for."""
    if line.state != "held" or held.state != "held":
        return
    given, has = counted(line.page_count, "page"), held.page_count
    if has > line.page_count:
        yield _of(look, line, f"it has {given}, and its holder uses {has}", _NEW_WORKER)
    elif held.pages_max and line.page_count > held.pages_max:
        what = f"it has {given}, and its holder asked for {held.pages_max} at most"
        yield _of(look, line, what, _NEW_WORKER)


def _of(look: Look, line: LeaseLine, what: str, then: str) -> Finding:
    """A finding about the lease of ``line``. Its trace is the worker's if the pager knows none: it
    may have granted the lease before it was traced."""
    trace = line.trace or next(
        (
            lease.trace
            for report in look.workers
            for lease in report.leases
            if lease.lease == line.lease and lease.trace
        ),
        "",
    )
    return Finding(look.pager.host, what, then, line.lease, line.owner, line.key.request, trace)


def _worker(line: LeaseLine) -> str:
    return line.owner.removeprefix("ticket of ")
