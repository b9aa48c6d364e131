"""What a pager says to operators who named what is not there."""

from __future__ import annotations

import pytest
from tests.unit.pager.rig import ROOT, Rig, Worker
from tests.unit.pager.steps import OTHER, cache, invalidated, pin

from pagemesh.wire.cache_messages import (
    AskCacheTop,
    AskCacheTree,
    CacheTop,
    CacheTree,
    InvalidateCache,
)
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.messages import Refused


def test_a_tenant_or_model_without_anything_is_answered_with_those_that_have(
    rig: Rig, worker: Worker
) -> None:
    assert invalidated(rig, "tenant", "alcie").known == []
    cache(worker, 1, range(8), terms=CacheTerms(tenant="alice"))
    cache(worker, 2, range(8), root=OTHER, terms=CacheTerms(tenant="bob"))
    assert invalidated(rig, "tenant", "alcie").known == ["alice", "bob"]
    assert len(invalidated(rig, "model", "nobodys").known) == 1
    assert invalidated(rig, "tenant", "bob").known == []
    assert invalidated(rig, "tenant", "bob").known == ["alice"]


@pytest.mark.parametrize("ask", [AskCacheTree(), AskCacheTop(by="size")])
def test_edges_are_listed_with_the_model_and_the_tenant_of_their_root(
    rig: Rig, worker: Worker, ask: AskCacheTree | AskCacheTop
) -> None:
    cache(worker, 1, range(8), terms=CacheTerms(tenant="alice"))
    cache(worker, 2, range(8), root=OTHER)
    names = {ROOT.hex(): ("a-model", "alice"), OTHER.hex(): ("a-model", "")}
    listing = rig.ask(ask)
    assert isinstance(listing, CacheTree | CacheTop)
    assert {line.root: (line.model, line.tenant) for line in listing.lines} == names
    rig.restart()  # and nobody has asked for them since
    listing = rig.ask(ask)
    assert isinstance(listing, CacheTree | CacheTop)
    assert [(line.model, line.tenant) for line in listing.lines] == [("", "")] * 2


def test_a_prefix_that_cannot_be_pinned_yet_is_answered_with_what_to_do(rig: Rig) -> None:
    short, unseen = pin(rig, range(3)), pin(rig, range(8))
    assert isinstance(short, Refused) and isinstance(unseen, Refused)
    assert short.message.endswith("this prefix has 3; give more of it")
    assert "send a prompt that begins with it first" in unseen.message
    assert "cache_salt" in unseen.message and "--messages" in unseen.message


def test_a_root_that_has_blanks_in_its_name_is_none(rig: Rig) -> None:
    """What is remembered of it could not be read again."""
    answer = rig.ask(InvalidateCache(what="root", name="ab" * 31 + "  "))
    assert isinstance(answer, Refused) and answer.code == "Gone"


def test_one_name_cannot_free_what_is_idle_of_everybody(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, range(8), terms=CacheTerms(tenant="alice"))
    answer = rig.ask(InvalidateCache(what="idle", name="bob"))
    assert isinstance(answer, Refused) and answer.code == "Malformed"
    assert "leave name out" in answer.message and len(rig.cached) == 2
