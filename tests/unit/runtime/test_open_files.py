"""How many files a process may open: what it can have, within reason."""

from __future__ import annotations

import os
import resource

import pytest

from pagemesh.runtime.open_files import (
    OPEN_FILES_MAX,
    allow_open_files,
    few_open_files_left,
    open_files_allowed,
)

ANY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "allowed"),
    [
        (1_024, 20_000, 20_000),
        (1_024, 1_024, 1_024),
        (1_024, 1 << 20, OPEN_FILES_MAX),
        (1_024, ANY, OPEN_FILES_MAX),
    ],
)
def test_the_limit_is_raised_as_far_as_it_may(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, allowed: int
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, made: limits.append(made))
    assert open_files_allowed() == allowed
    allow_open_files()
    assert limits[-1] == (allowed, hard)


@pytest.mark.parametrize("limits", [(1 << 20, 1 << 20), (ANY, ANY)])
def test_what_is_above_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: pytest.fail("it was changed"))
    allow_open_files()
    assert open_files_allowed() >= OPEN_FILES_MAX


@pytest.mark.parametrize(
    ("limit", "known", "open_count", "are_few"),
    [
        (1_024, 900, 985, False),
        (1_024, 980, 995, True),
        (26, 0, 17, False),
        (26, 2, 18, True),
        (ANY, 1_000_000, 1_000_020, False),
    ],
)
def test_few_are_left_close_to_the_limit_alone(
    monkeypatch: pytest.MonkeyPatch, limit: int, known: int, open_count: int, are_few: bool
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (limit, limit))
    monkeypatch.setattr(os, "listdir", lambda _folder: ["0"] * (open_count + 1))
    assert few_open_files_left(known) == ((open_count, limit) if are_few else None)


def test_far_from_the_limit_files_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (65_536, 65_536))
    monkeypatch.setattr(os, "listdir", lambda _folder: pytest.fail("they were counted"))
    assert few_open_files_left(60_000) is None


def test_where_no_file_can_be_opened_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_folder: str) -> list[str]:
        raise OSError

    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (1_024, 1_024))
    monkeypatch.setattr(os, "listdir", refuse)
    assert few_open_files_left(1_000) == (1_024, 1_024)
