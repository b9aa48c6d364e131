"""The configuration of a NATS server whose users have exactly the permissions of their role.

Rendered from ``wire.subjects.permissions``, both for the server that ``pagemesh up`` starts and for
``ops/nats/nats-server.conf``, so that neither can drift from the code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from pagemesh.runtime.bus.messages import MESSAGE_BYTES_WANTED
from pagemesh.wire.subjects import BUS_ROLES, BusRole, Permissions, permissions

_TLS = """\
# To ask clients for certificates too, add: ca_file: PATH, verify: true
tls {
  cert_file: $PAGEMESH_NATS_TLS_CERT
  key_file: $PAGEMESH_NATS_TLS_KEY
  timeout: 2
}"""
_HEAD = "# Made by pagemesh.cli.mesh.nats_conf from wire.subjects.permissions; do not edit."


def render(*, host: str, port: int, passwords: Mapping[BusRole, str], more: str = "") -> str:
    """The text of the file. ``passwords`` are inserted verbatim: quote them, or name a variable as
    ``$NAME``. ``more``: further lines, such as a monitoring port or a tls block."""
    users = ",\n".join(_user(role, passwords[role]) for role in BUS_ROLES)
    blocks = [
        _HEAD,
        f"listen: {json.dumps(f'{host}:{port}')}",
        f"max_payload: {MESSAGE_BYTES_WANTED}",
        "max_connections: 1024",
        'write_deadline: "5s"',
        'ping_interval: "5s"',
        "ping_max: 2",
        *([more] if more else []),
        f"authorization {{\n  timeout: 2\n  users: [\n{users}\n  ]\n}}",
    ]
    return "\n".join(blocks) + "\n"


def render_for_compose(*, tls: bool = False) -> str:
    """The text of ``ops/nats/nats-server.conf``, or with ``tls`` of ``nats-server-tls.conf`` beside
    it. Passwords and paths come from the server's environment; port 8222 answers health checks."""
    passwords: dict[BusRole, str] = {
        role: f"$PAGEMESH_NATS_PASSWORD_{role.upper()}" for role in BUS_ROLES
    }
    more = "http_port: 8222" + (f"\n{_TLS}" if tls else "")
    return render(host="0.0.0.0", port=4222, passwords=passwords, more=more)


def quoted(password: str) -> str:
    """``password`` as a string literal of the configuration language."""
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


if __name__ == "__main__":
    sys.stdout.write(render_for_compose(tls="--tls" in sys.argv[1:]))
