"""Does what pagers and workers say of leases and pages add up? Pure: from two looks to findings.

Grants and releases are under way all the time, so a difference counts only when both looks, some
time apart, show it. What does not depend on two parties is judged in one look:

    ledger    free + held + pinned + idle + draining = all pages; each held or draining page is
              some lease's, or waits for a worker that has not spoken since the pager began
    ticket    an offered lease has a ticket that is not over
    lease     who holds it for the pager is there, and knows it; what a worker holds the pager knows
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagemesh.wire.pager_reports import LeaseLine, PagerReport, WorkerReport


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that does not add up. ``owner``, ``request`` and ``trace`` are empty when it
    is nobody's."""

    host: str
    what: str
    lease: int = 0
    owner: str = ""
    request: str = ""
    trace: str = ""

    @property
    def text(self) -> str:
        """One line."""
        parts = [f"{self.host}: {self.what}"]
        if self.lease:
            parts.append(f"lease {self.lease:x} of {self.owner}")
            parts.append(f"request {self.request}, trace {self.trace or 'not sampled'}")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Look:
    """What a pager and the workers of its host said at one time. ``silent``: workers that
    announced themselves, or that the pager knows, and that did not answer."""

    pager: PagerReport
    workers: tuple[WorkerReport, ...]
    silent: frozenset[str] = frozenset()


def reconcile(first: Look, second: Look) -> list[Finding]:
    """What does not add up in ``second``, or in both."""
    before = set(_differences(first))
    lasting = [finding for finding in _differences(second) if finding in before]
    return [*_ledger(second.pager), *_tickets(first.pager, second.pager), *lasting]


def _ledger(pager: PagerReport) -> Iterator[Finding]:
    states = (
        pager.free_pages, pager.held_pages, pager.pinned_pages, pager.idle_pages,
        pager.draining_pages,
    )  # fmt: skip
    if sum(states) != pager.total_pages:
        yield Finding(pager.host, f"{sum(states)} pages are accounted for, not {pager.total_pages}")
    owned = sum(line.held_pages for line in pager.leases) + pager.unclaimed_pages
    wanted = pager.held_pages + pager.draining_pages
    if owned != wanted:
        yield Finding(pager.host, f"{wanted} pages are held or draining, {owned} have an owner")
    offered = sum(line.state == "offered" for line in pager.leases)
    if offered != pager.ticket_count:
        yield Finding(pager.host, f"{pager.ticket_count} tickets for {offered} offered leases")


def _tickets(before: PagerReport, pager: PagerReport) -> Iterator[Finding]:
    """Tickets that were over at both times: one is ended at the next tick."""
    over = {line.lease for line in before.leases if _is_over(line)}
    for line in pager.leases:
        if _is_over(line) and line.lease in over:
            yield _of(pager.host, line, "a ticket that is over still holds pages")


def _is_over(line: LeaseLine) -> bool:
    return line.state == "offered" and not line.expires_in_ms


def _differences(look: Look) -> Iterator[Finding]:
    host = look.pager.host
    known = {line.lease: line for line in look.pager.leases}
    by_incarnation = {
        report.incarnation: (report, {lease.lease for lease in report.leases})
        for report in look.workers
    }
    for line in look.pager.leases:
        if line.state == "offered" or _worker(line) in look.silent:
            continue
        holder, held = by_incarnation.get(line.incarnation, (None, frozenset[int]()))
        if holder is None:
            yield _of(host, line, "its holder is not there")
        elif line.lease not in held and not holder.debt_count:
            yield _of(host, line, "its holder does not know it")
    for report in look.workers:
        for lease in report.leases:
            found = known.get(lease.lease)
            if lease.state == "held" and (found is None or found.incarnation != report.incarnation):
                yield Finding(
                    host, "the pager does not know it, and a worker uses it", lease.lease,
                    report.worker, lease.key.request, lease.trace,
                )  # fmt: skip


def _of(host: str, line: LeaseLine, what: str) -> Finding:
    return Finding(host, what, line.lease, line.owner, line.key.request, line.trace)


def _worker(line: LeaseLine) -> str:
    return line.owner.removeprefix("ticket of ")
