"""The configuration of a NATS server whose users may do exactly what their role does.

Rendered from ``wire.subjects.permissions``, for the server that ``pagemesh up`` starts and
for ``ops/nats/nats-server.conf`` alike, so that the two and the code cannot drift apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from pagemesh.wire.subjects import BUS_ROLES, BusRole, Permissions, permissions

MAX_PAYLOAD_BYTES = 8 << 20
"""The longest prompts travel in one message of packed ids; the default of 1 MiB is too low."""
_HEAD = "# Made by pagemesh.cli.nats_conf from wire.subjects.permissions; do not edit."


def render(*, host: str, port: int, passwords: Mapping[BusRole, str], tls: str = "") -> str:
    """The file. ``passwords`` are inserted as given: quote them, or name a variable as
    ``$NAME``. ``tls`` is a block to insert, for a server that is reached over a network."""
    users = ",\n".join(_user(role, passwords[role]) for role in BUS_ROLES)
    blocks = [
        _HEAD,
        f"listen: {json.dumps(f'{host}:{port}')}",
        f"max_payload: {MAX_PAYLOAD_BYTES}",
        "max_connections: 1024",
        'write_deadline: "5s"',
        'ping_interval: "5s"',
        "ping_max: 2",
        'lame_duck_duration: "1s"',
        'lame_duck_grace_period: "0s"',
        *([tls] if tls else []),
        f"authorization {{\n  timeout: 2\n  users: [\n{users}\n  ]\n}}",
    ]
    return "\n".join(blocks) + "\n"


def quoted(password: str) -> str:
    """``password`` as a string of the configuration language."""
    return json.dumps(password)


def _user(role: BusRole, password: str) -> str:
    allowed: Permissions = permissions(role)
    return (
        f"    {{ user: {role}, password: {password}, permissions: {{\n"
        f"      publish: {{ allow: {json.dumps(allowed.publish)} }},\n"
        f"      subscribe: {{ allow: {json.dumps(allowed.subscribe)} }},\n"
        "      allow_responses: true\n"
        "    } }"
    )
