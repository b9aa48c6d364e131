"""The NATS server's configuration is what ``wire.subjects.permissions`` says."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from pagemesh.cli.mesh import nats_conf
from pagemesh.runtime.nats_server import find_nats_server
from pagemesh.wire.subjects import BUS_ROLES, BusRole, permissions

COMMITTED = Path(__file__).parents[3] / "ops" / "nats" / "nats-server.conf"


def test_the_committed_files_are_up_to_date() -> None:
    assert COMMITTED.read_text() == nats_conf.render_for_compose(), (
        "run: python -m pagemesh.cli.mesh.nats_conf > ops/nats/nats-server.conf"
    )
    with_tls = COMMITTED.with_name("nats-server-tls.conf").read_text()
    assert with_tls == nats_conf.render_for_compose(tls=True), (
        "run: python -m pagemesh.cli.mesh.nats_conf --tls > ops/nats/nats-server-tls.conf"
    )


@pytest.mark.parametrize("role", BUS_ROLES)
def test_each_role_may_do_what_its_permissions_say_and_nothing_else(role: BusRole) -> None:
    user = re.search(rf"user: {role}, .*?allow_responses", COMMITTED.read_text(), re.DOTALL)
    assert user is not None
    lists = [json.loads(found) for found in re.findall(r"allow: (\[.*?\]) }", user.group())]
    assert lists == [list(permissions(role).publish), list(permissions(role).subscribe)]


def test_the_server_accepts_the_committed_file(tmp_path: Path) -> None:
    passwords = {f"PAGEMESH_NATS_PASSWORD_{role.upper()}": "p" * 20 for role in BUS_ROLES}
    checked = subprocess.run(
        [find_nats_server(), "-t", "-c", COMMITTED],
        env=os.environ | passwords, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stderr


def test_the_server_does_not_start_without_passwords() -> None:
    checked = subprocess.run(
        [find_nats_server(), "-t", "-c", COMMITTED], capture_output=True, text=True, check=False
    )
    assert checked.returncode != 0
    assert "PAGEMESH_NATS_PASSWORD_CLIENT" in checked.stderr


def test_a_password_of_any_characters_is_one_string() -> None:
    hostile = 'a" }, { user: root, password: "b\\'
    text = nats_conf.render(
        host="127.0.0.1", port=1, passwords=dict.fromkeys(BUS_ROLES, nats_conf.quoted(hostile))
    )
    assert text.count("user: ") - text.count("user: root") == len(BUS_ROLES)
    assert json.dumps(hostile) in text


def test_clients_answer_nobody_and_no_connection_has_subscriptions_without_end() -> None:
    text = COMMITTED.read_text()
    answers = dict(re.findall(r"user: (\w+), .*?allow_responses: (\w+)", text, re.DOTALL))
    assert answers == {role: "false" if role == "client" else "true" for role in BUS_ROLES}
    assert "max_subscriptions: 1024" in text
