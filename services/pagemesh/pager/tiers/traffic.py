"""What moves between the pool and the disk, and when.

    evicted from the pool --StorePages--> a slot on disk
    an admission that misses, and whose next pages are on disk and faster to read than to compute:

        HELD by who fills them   --LoadPages--> PagesLoaded --> COMMITTED, and matched by all
                 ^                                   |           who waited for them
                 |                                   `--> FREE   pages that were not loaded
                 admissions wait as for any prefix in flight (``in_flight``)

A page's bytes are copied before it is granted to anybody else, so no page waits for the disk. A
page that is being read into is held only by who fills it until its contents are verified, and is
given back only when the reader is done with it, whatever happens meanwhile.

When the disk fails, or too many pages there are damaged (``damage``), the tier is switched off for
the rest of this pager's life, and everything else goes on as if there had never been one.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagemesh.pager.books import Books
from pagemesh.pager.events import PagesStored, WriteHeaders
from pagemesh.pager.pages.runs import Pages, as_run, first_of, join, join_all, part
from pagemesh.pager.retention.roots import leave_retired
from pagemesh.pager.tiers.chain_keys import chain_at, chain_keys, chain_over, root_chain
from pagemesh.pager.tiers.damage import Damage
from pagemesh.pager.tiers.disk_shelves import Record
from pagemesh.pager.tiers.disk_tier import DiskTier
from pagemesh.pager.tiers.load import PAGER, Load
from pagemesh.pager.tiers.movers import Movers
from pagemesh.pager.tiers.storing import Storing, forget
from pagemesh.pager.tiers.tier_events import (
    DiskFailed,
    DiskFound,
    DiskOpening,
    ForgetRetired,
    ForgetSlots,
    GiveUpDisk,
    LoadPages,
    PagesLoaded,
    PagesNotTaken,
    PagesWritten,
    PutAway,
    RememberRetired,
    RetiredRoots,
    TellDamaged,
    TierEvent,
)
from pagemesh.pager.tree.radix import Match, Tree
from pagemesh.wire.cache_messages import DiskLine
from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.pager_messages import Admit
from pagemesh.wire.pool_format import IN_FILE, HeaderState

_LOAD_PAGES_MAX = 1_024
"""Pages in one load; what follows is loaded by the next admission that gets there."""
_SWEPT_PAGES_MAX = 1_024
"""Pages that are forgotten in one turn."""


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Pages of a prompt that follow its match and are on disk: if ``is_worth``, those that are
    worth reading; otherwise all of them, since none is."""

    records: list[Record]
    is_worth: bool


class Tiers:
    """Stores what is evicted; loads what admissions ask for."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._page_size = books.facts.page_size
        self._width = books.facts.page_token_bytes
        self.is_opening = False
        """The disk is being opened: it is not known yet whether there is one."""
        self.why_off = "PAGEMESH_DISK_DIR names no folder"
        self._retired = RetiredRoots()
        """Roots that the disk has to forget once it is open."""
        self._retired_number = 0
        self._must_forget = False
        self._chain_key = b""
        """That of the last disk, which may be off by now."""
        self._movers, self._damage = Movers(books.limits), Damage()
        self._storing = Storing(books, self._movers, self._damage, self._unseen)
        self._hears = False
        """Whether ``_storing`` is told of what leaves the pool."""

    def handle(self, event: TierEvent) -> None:
        """The disk was opened, has done something, or has failed."""
        disk = self._books.disk
        match event:
            case DiskOpening():
                self.is_opening = True
                self._hear()
            case DiskFound():
                self._found(event)
            case PagesWritten(slots):
                if disk is not None:
                    forget(self._books, disk.written(slots))
            case PagesNotTaken(slots):
                self._movers.failed_out(self._books.now_ms)
                if disk is not None:
                    forget(self._books, disk.not_taken(slots))
            case PagesLoaded():
                self._loaded(event)
            case DiskFailed(why):
                self._switch_off(why)
            case PutAway(anew):
                self._storing.put_away(anew=anew)

    def _hear(self) -> None:
        if not self._hears:
            self._hears = True
            self._books.forest.on_leave(self._storing.leaving)

    def _switch_off(self, why: str) -> None:
        self._books.disk = None
        self.is_opening, self.why_off = False, why
        for root in self._storing.invalidated:  # it may have failed before it forgot them
            self._unseen(root)

    def retire(self, retired: RetiredRoots) -> None:
        """No pager ever reads a page of these roots again. They are remembered until the disk has
        nothing of them any more, which may take long: if there is no disk tier now, or it has
        failed, a later pager may have one."""
        for load in self._books.loads.values():
            if load.tree.digest in retired:
                load.is_unwanted = True
                self._books.in_flight.leave(load)
        self._remember(retired)
        disk = self._books.disk
        if disk is None:
            self._retired |= retired
        else:
            self._retire_on(disk, retired)

    def _remember(self, retired: RetiredRoots) -> None:
        self._retired_number += 1
        self._books.out.append(RememberRetired(self._retired_number, retired))

    def _unseen(self, root: bytes) -> None:
        """Pages of ``root`` must not be used again, and nobody knows now which of them a disk has:
        it is to forget the whole root when it can."""
        if root not in self._retired:
            retired = RetiredRoots(frozenset({root}))
            self._remember(retired)
            self._retired |= retired

    def _retire_on(self, disk: DiskTier, retired: RetiredRoots) -> None:
        disk.retire(disk.roots() if retired.everything else retired.roots)
        self._must_forget = True

    @property
    def is_sweeping(self) -> bool:
        """Whether there is more for ``sweep`` to do."""
        disk = self._books.disk
        return disk is not None and (disk.is_sweeping or self._storing.has_strays)

    def sweep(self) -> None:
        """Have the disk forget a turn's worth of what was retired or cannot be found any more."""
        disk = self._books.disk
        if disk is None:
            return
        self._storing.drop_strays(disk, _SWEPT_PAGES_MAX)
        if not self._must_forget:
            return
        forget(self._books, disk.sweep(_SWEPT_PAGES_MAX))
        if not disk.is_sweeping:
            self._must_forget = False
            self._books.out.append(ForgetRetired(self._retired_number))

    def roots(self) -> set[bytes]:
        """The roots that have pages on disk."""
        disk = self._books.disk
        return set() if disk is None else disk.roots()

    def line(self) -> DiskLine:
        """What operators are told."""
        disk = self._books.disk
        if disk is not None:
            return disk.line()
        if self.is_opening:
            return DiskLine(state="opening")
        return DiskLine(state="off", why_off=self.why_off)

    def check(self) -> None:
        """Raise ``AssertionError`` unless all that is on disk can be found."""
        self._storing.check()

    # Into the pool

    def find(self, match: Match, message: Admit) -> OnDisk | None:
        """What follows ``match`` on disk, if anything does."""
        books = self._books
        disk = books.disk
        if disk is None or not disk.page_count or not message.read_cache:
            return None
        last = len(message.tokens) // 4 - 1
        pages_max = min(last // self._page_size - match.pages, _LOAD_PAGES_MAX, self._room())
        if pages_max <= 0 or not self._movers.can_fill(message.incarnation, books):
            return None
        if books.forest.over_pages(match, message.tokens, match.pages + pages_max):
            return None  # expired pages are still in the place of what would be read
        at, start = match.pages * self._width, self._chain_of(match, message)
        records = disk.run(message.root, start, message.tokens, at, pages_max)
        if not records:
            return None
        worth = disk.cost.pages_worth([record.slot for record in records], books.now_ms)
        if not worth:
            disk.counts.declined += len(records)
        return OnDisk(records[: worth or None], is_worth=bool(worth))

    def _room(self) -> int:
        """How many more pages may be read into, of half the pool. A disk that does not answer keeps
        its pages for good, and sequences that compute need the rest."""
        reading = sum([len(load.pages) for load in self._books.loads.values()])
        return self._books.facts.page_count // 2 - reading

    def damaged_pages(self, match: Match, message: Admit) -> int:
        """How many pages right after ``match`` were on disk, and were lost because of damage."""
        if not self._damage.has_runs:
            return 0
        pages_max = (len(message.tokens) // 4 - 1) // self._page_size
        at, end, width = match.pages * self._width, pages_max * self._width, self._width
        chains = chain_keys(self._chain_of(match, message), message.tokens, at, end, width)
        return self._damage.lost_pages(message.root, chains)

    def _chain_of(self, match: Match, message: Admit) -> int:
        """The chain key of the last page of ``match``."""
        at, node_at = match.pages * self._width, match.node.depth * self._width
        root_start = root_chain(self._chain_key, message.root)
        start = chain_at(match.node, root_start, self._width)
        return chain_over(start, message.tokens, node_at, at, self._width)

    def load(self, tree: Tree, match: Match, on_disk: OnDisk, message: Admit) -> Load:
        """Begin to read ``on_disk``, for which there must be room. Others may now wait for it."""
        books, records = self._books, on_disk.records
        disk = books.disk
        assert disk is not None
        start, count = match.pages, len(records)
        disk.touch(records)
        disk.hold(records)  # first: what is evicted for them must not take their slots
        anchor = books.forest.pin_match(match)
        # On a device the worker fills them, and may stall while it does so.
        mover = PAGER if books.facts.place == IN_FILE else message.incarnation
        pages = as_run(join_all(books.take_pages(count, mover, tree)))
        number = books.pool.number()
        at, end = start * self._width, (start + count) * self._width
        load = Load(
            number, SequenceKey(request=f"{number:032x}", attempt=1, choice=0), tree, anchor,
            pages, message.tokens[at:end], start * self._page_size, records, start, books.now_ms,
            mover,
        )  # fmt: skip
        tree.lease_count += 1
        tree.root.account.used_pages += count  # like a lease's: nobody else can have them now
        books.loads[number] = load
        slots = tuple(record.slot for record in records)
        disk.cost.begun(number, slots)
        tokens = message.tokens[:end]
        books.out.append(LoadPages(number, pages, slots, tree.digest, tokens, start, mover))
        books.in_flight.enter(load, start + count)
        return load

    def _loaded(self, event: PagesLoaded) -> None:
        """Commit what is verified, give back the rest, and let those who waited continue."""
        books = self._books
        load = books.loads.pop(event.load)
        disk = books.disk
        if disk is not None:
            disk.release(load.records)
            read = load.records[: event.page_count]
            disk.cost.loaded(event, [record.slot for record in read], books.now_ms)
            damaged = False
            if event.bad_slot is not None:
                damaged = self._drop_bad(disk, load, event.bad_slot, is_other=event.is_other)
            self._damage.loaded(is_damaged=damaged)
            if event.bad_slot is None and event.page_count < len(load.records):
                self._movers.failed_in(load.incarnation, books.now_ms)
            disk.counts.loaded += event.page_count
            disk.counts.from_memory += event.memory_count
        load.tree.root.account.used_pages -= len(load.pages)
        good = 0 if load.is_unwanted else event.page_count
        rest = part(load.pages, good, len(load.pages))
        if good:
            rest = self._commit(load, part(load.pages, 0, good), rest)
        books.pool.give(rest)
        books.set_states(rest, HeaderState.FREE)
        if load.prompt_pages:
            books.in_flight.fetched(load, load.first_page)
            if good:
                books.in_flight.committed(load, books.now_ms)
            books.in_flight.leave(load)
        books.forest.unpin(load.anchor)
        load.tree.lease_count -= 1
        if load.tree.is_retired:
            leave_retired(books, load.tree, load.anchor)
        books.freed = True
        if disk is not None and self._damage.is_too_much:
            counts = self._damage.damaged_count, self._damage.load_count
            self._switch_off("too many pages on disk are damaged")
            books.out.append(GiveUpDisk(*counts))

    def _commit(self, load: Load, pages: Pages, rest: Pages) -> Pages:
        """Put ``pages`` into the tree. Returns ``rest`` and those of ``pages`` that somebody else
        has computed meanwhile."""
        books, tree = self._books, load.tree
        tokens = load.tokens[: len(pages) * self._width]
        before = load.anchor
        inserted = books.forest.insert(before, tokens, pages, grow=False)
        books.forest.unpin(before)
        load.anchor = inserted.node
        known, after = inserted.known_pages, inserted.after
        fresh = part(pages, known, len(pages))
        if len(fresh):
            fresh_tokens = tokens[known * self._width :]
            books.out.append(
                WriteHeaders(
                    fresh, HeaderState.COMMITTED, books.pool.sequences_of(fresh), PAGER,
                    tree.index, inserted.first_identity,
                    books.pool.identity_of(first_of(after)) if len(after) else 0, fresh_tokens,
                )
            )  # fmt: skip
            books.late.append(PagesStored(tree.digest, after, fresh, fresh_tokens))
        return join(part(pages, 0, known), rest)

    def _drop_bad(self, disk: DiskTier, load: Load, slot: int, *, is_other: bool) -> bool:
        """Drop the bad page and those after it in ``load``, so that they are not tried again: they
        are computed now and stored anew; otherwise each request might find the next damaged page.
        False: the disk is not to blame, as the page was dropped meanwhile, or is another one."""
        bad = next(at for at, record in enumerate(load.records) if record.slot == slot)
        is_there = not load.records[bad].is_dropped
        dropped = disk.drop_all(load.records[bad:])
        if is_other:
            disk.counts.cut_off += len(dropped)
            forget(self._books, dropped)
            return False
        disk.counts.corrupt += is_there
        disk.counts.after_corrupt += len(dropped) - is_there
        forget(self._books, dropped)
        if is_there:
            lost = [record.chain for record in load.records[bad:]]
            self._damage.lost(load.tree.digest, lost)
            self._books.out.append(TellDamaged(slot))
        return is_there

    def _found(self, event: DiskFound) -> None:
        books = self._books
        disk = books.disk = event.tier
        self._chain_key = disk.chain_key
        self._hear()
        self.is_opening, self.why_off = False, ""
        if disk.older_slots:
            books.out.append(ForgetSlots(tuple(disk.older_slots)))
        retired, self._retired = self._retired | event.retired, RetiredRoots()
        if retired:
            self._retire_on(disk, retired)
        self._storing.find_strays(disk)
        self.sweep()
