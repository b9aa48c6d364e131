"""How many files a process may open: what it can have, within reason."""

from __future__ import annotations

import resource

import pytest

from pagemesh.runtime.open_files import OPEN_FILES_MAX, allow_open_files, open_files_allowed

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
