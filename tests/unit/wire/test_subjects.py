"""Subjects: one place, and templates that stay few."""

from __future__ import annotations

import pytest

from pagemesh.wire import subjects
from pagemesh.wire.subjects import BUS_ROLES, permissions, tenant_permissions

OURS = [
    subjects.CHAT_COMPLETIONS,
    subjects.COMPLETIONS,
    subjects.MODELS,
    subjects.PRESENCE,
    subjects.ASK_PRESENCE,
    subjects.pager("h"),
    subjects.pager_report("h"),
    subjects.pages("h"),
    subjects.worker("w"),
    subjects.gateway("g"),
    subjects.worker_report("w"),
    subjects.cache_door("stats"),
    subjects.cache_door("stats", "h"),
    subjects.inbox_prefix("gateway", "g") + ".x",
]


def matches(pattern: str, subject: str) -> bool:
    """NATS' own rule: ``*`` is one token, ``>`` at the end is one or more."""
    wanted, given = pattern.split("."), subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(given) > index
        if index >= len(given) or token not in ("*", given[index]):
            return False
    return len(wanted) == len(given)


def test_no_two_things_share_a_subject() -> None:
    assert len(set(OURS)) == len(OURS)


@pytest.mark.parametrize(
    ("subject", "template"),
    [
        (subjects.worker("w-17"), "pagemesh.mesh.v1.worker.{name}"),
        (subjects.pager("host-3"), "pagemesh.mesh.v1.pager.{name}"),
        (subjects.pages("host-3"), "pagemesh.mesh.v1.pages.{name}"),
        (subjects.gateway("g"), "pagemesh.mesh.v1.gateway.{name}"),
        (subjects.PRESENCE, subjects.PRESENCE),
        (subjects.ASK_PRESENCE, subjects.ASK_PRESENCE),
        (subjects.pager_report("host-3"), "pagemesh.mesh.v1.report.{name}"),
        (subjects.worker_report("w-17"), "pagemesh.mesh.v1.inspect.{name}"),
        (subjects.cache_door("pin", "host-3"), "pagemesh.v1.pages.pin.{name}"),
        (subjects.cache_door("pin"), "pagemesh.v1.pages.pin"),
        (subjects.CHAT_COMPLETIONS, subjects.CHAT_COMPLETIONS),
        ("_INBOX.abc.def", "inbox"),
        (subjects.inbox_prefix("pager", "p") + ".1f", "inbox"),
    ],
)
def test_a_template_has_no_names(subject: str, template: str) -> None:
    assert subjects.template(subject) == template


@pytest.mark.parametrize("role", BUS_ROLES)
def test_wildcards_stand_for_whole_tokens(role: subjects.BusRole) -> None:
    allowed = permissions(role)
    for pattern in (*allowed.publish, *allowed.subscribe):
        for token in pattern.split("."):
            assert token in ("*", ">") or not set(token) & set("*>"), pattern
        assert ">" not in pattern.split(".")[:-1]


@pytest.mark.parametrize("role", BUS_ROLES)
def test_a_role_hears_its_own_inboxes_and_no_other_roles(role: subjects.BusRole) -> None:
    heard = [
        other
        for other in BUS_ROLES
        if any(
            matches(pattern, subjects.inbox_prefix(other, "n") + ".a.1")
            for pattern in permissions(role).subscribe
        )
    ]
    assert heard == [role]


def test_an_operator_can_ask_and_keep_the_cache_and_do_nothing_else() -> None:
    assert said_by("operator") == [
        subjects.ASK_PRESENCE,
        subjects.pager_report("h"),
        subjects.worker_report("w"),
        subjects.cache_door("stats"),
        subjects.cache_door("stats", "h"),
    ]


@pytest.mark.parametrize("role", [role for role in BUS_ROLES if role != "operator"])
def test_nobody_but_operators_may_ask_at_the_door_of_the_cache(role: subjects.BusRole) -> None:
    assert not {subjects.cache_door("stats"), subjects.cache_door("stats", "h")} & {*said_by(role)}


def said_by(role: subjects.BusRole) -> list[str]:
    allowed = permissions(role).publish
    return [subject for subject in OURS if any(matches(pattern, subject) for pattern in allowed)]


def test_a_tenant_hears_itself_alone() -> None:
    heard = [
        subject
        for subject in [*OURS, "_INBOX_client.alice.a.1", "_INBOX_client.bob.a.1", "_INBOX.x"]
        if any(matches(pattern, subject) for pattern in tenant_permissions("alice").subscribe)
    ]
    assert heard == ["_INBOX_client.alice.a.1"]


@pytest.mark.parametrize(
    ("reply", "client", "operator"),
    [
        ("_INBOX.a.1", True, True),
        ("_INBOX_client.alice.a.1", True, True),
        ("my.own.inbox", True, True),
        ("pagemeshes.1", True, True),
        (subjects.inbox_prefix("operator", "o") + ".1", False, True),
        (subjects.inbox_prefix("gateway", "g") + ".1", False, False),
        (subjects.worker("w"), False, False),
        (subjects.CHAT_COMPLETIONS, False, False),
        ("$SRV.PING", False, False),
        # The refusal of one of these is told in lower case, as that of the real one.
        ("_Inbox.a.1", False, False),
        ("_INBOX_Client.alice.a.1", False, False),
        ("_inbox_OPERATOR.o.1", False, False),
        (subjects.worker("w").upper(), False, False),
        ("PageMesh.mesh.v1.pager.h", False, False),
        ("_inbox_GATEWAY.g.1", False, False),
        *(
            (wrong, False, False)
            for wrong in (
                "",
                ".",
                "a..b",
                "a.",
                ">",
                "a.>",
                "a.*.b",
                "é.x",
                "a\tb.c",
                "x" * 1_025,
            )
        ),
    ],
)
def test_answers_go_to_inboxes_and_to_nothing_that_services_hear(
    reply: str, client: bool, operator: bool
) -> None:
    assert subjects.may_be_answered(reply) == client
    assert subjects.may_be_answered(reply, operators=True) == operator
