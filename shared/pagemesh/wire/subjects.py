"""Every NATS subject, in one place; permissions are derived from the same lines.

pagemesh.v1.chat.completions      client door (OpenAI JSON), queue group "gateway"
pagemesh.v1.completions
pagemesh.v1.models
pagemesh.v1.pages.VERB              operators' door (JSON), every pager; VERB.HOST: that host's
pagemesh.mesh.v1.pager.HOST                 requests to the pager of a host
pagemesh.mesh.v1.pages.HOST                 its stream of PagesChanged
pagemesh.mesh.v1.worker.NAME                requests and notices to a worker
pagemesh.mesh.v1.gateway.NAME               Frames to a gateway
pagemesh.mesh.v1.gateway.=HASH              clients' calls to a model, handed on by gateways of
                                            other models; queue group "gateway"
pagemesh.mesh.v1.presence                   Announce
pagemesh.mesh.v1.ask                        AskPresence
pagemesh.mesh.v1.report.HOST                InspectPager
pagemesh.mesh.v1.inspect.NAME               InspectWorker

Permissions are granted by subject, not by message, so read-only questions have subjects of their
own: an operator may ask them, and can neither announce a service nor move a page. Operators'
changes to the cache have subjects that no client may use.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

CLIENT_PREFIX = "pagemesh.v1"
CHAT_COMPLETIONS = f"{CLIENT_PREFIX}.chat.completions"
COMPLETIONS = f"{CLIENT_PREFIX}.completions"
MODELS = f"{CLIENT_PREFIX}.models"
CLIENT_QUEUE = "gateway"
CACHE_PREFIX = f"{CLIENT_PREFIX}.pages"
_CLIENT_DOOR = (CHAT_COMPLETIONS, COMPLETIONS, MODELS)

MESH_PREFIX = "pagemesh.mesh.v1"
PRESENCE = f"{MESH_PREFIX}.presence"
ASK_PRESENCE = f"{MESH_PREFIX}.ask"
INBOX_PREFIX = "_INBOX"
SUBJECT_BYTES_MAX = 1_024
SUBJECT = re.compile(r"[!-~]+")
"""Any subject to send to or to listen on."""


def pager(host: str) -> str:
    return f"{MESH_PREFIX}.pager.{host}"


def pager_report(host: str) -> str:
    return f"{MESH_PREFIX}.report.{host}"


def worker_report(name: str) -> str:
    return f"{MESH_PREFIX}.inspect.{name}"


def cache_door(verb: str, host: str = "") -> str:
    """Where operators ask the pager of ``host``, or without a host all pagers."""
    return ".".join(part for part in (CACHE_PREFIX, verb, host) if part)


def pages(host: str) -> str:
    return f"{MESH_PREFIX}.pages.{host}"


def worker(name: str) -> str:
    return f"{MESH_PREFIX}.worker.{name}"


def gateway(name: str) -> str:
    return f"{MESH_PREFIX}.gateway.{name}"


def gateways_of(model: str) -> str:
    """All gateways that serve ``model``. No service's name begins with ``=``, and the hash is one
    token whatever the model is called."""
    return f"{MESH_PREFIX}.gateway.={blake2b(model.encode(), digest_size=16).hexdigest()}"


def inbox_prefix(role: str, name: str) -> str:
    """Each service has inboxes of its own, so that permissions can keep others out. The name
    is a token by itself, since a wildcard matches only whole tokens."""
    return f"{INBOX_PREFIX}_{role}.{name}"


def is_subject(subject: str) -> bool:
    """Whether a message can be sent to ``subject``: no wildcard, no empty token, no character that
    NATS cannot carry."""
    tokens = subject.split(".")
    whole = len(subject) <= SUBJECT_BYTES_MAX and SUBJECT.fullmatch(subject) is not None
    return whole and all(tokens) and not {"*", ">"} & {*tokens}


def may_be_answered(reply: str, *, operators: bool = False) -> bool:
    """Whether a service may answer a client on ``reply``, or with ``operators`` also an operator.
    It may in any inbox of theirs, but neither on a subject that services listen on nor in a
    service's inbox, since its word counts for more than a client's. Nor if ``reply`` differs from
    one of these only in case: the server refuses that, and nats-py reports the refusal in lower
    case, as if it were for the real subject."""
    first = reply.partition(".")[0]
    if first in _CLIENT_INBOXES or (operators and first == _OPERATOR_INBOX):
        return is_subject(reply)
    return not first.startswith("$") and first.lower() not in _RESERVED and is_subject(reply)


def template(subject: str) -> str:
    """``subject`` with names replaced: low cardinality, for span and metric attributes."""
    if subject.startswith(INBOX_PREFIX):
        return "inbox"
    parts = subject.split(".")
    named = subject.startswith((MESH_PREFIX + ".", CACHE_PREFIX + "."))
    if named and len(parts) > 4:
        return ".".join([*parts[:4], "{name}"])
    return subject


@dataclass(frozen=True, slots=True)
class Permissions:
    """What a role may publish and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


BusRole = Literal["client", "gateway", "prefill", "decode", "pager", "operator"]
BUS_ROLES: tuple[BusRole, ...] = ("client", "gateway", "prefill", "decode", "pager", "operator")


_CLIENT_INBOXES = (INBOX_PREFIX, f"{INBOX_PREFIX}_client")
_OPERATOR_INBOX = f"{INBOX_PREFIX}_operator"
_RESERVED = frozenset(
    name.lower() for name in ("pagemesh", INBOX_PREFIX, *(f"{INBOX_PREFIX}_{r}" for r in BUS_ROLES))
)
"""First tokens, in lower case, of the subjects that services listen on and of all inboxes."""


def permissions(role: BusRole) -> Permissions:
    """NATS permissions of a role; ``allow_responses`` lets every service answer inboxes.

    A ``client`` may be any NATS client with its default inboxes; the inboxes of our services begin
    otherwise. Clients that must not hear each other are tenants (``tenant_permissions``).
    An ``operator`` watches (presence, reports of pagers and workers) and manages the cache.
    """
    mesh = MESH_PREFIX
    presence = (PRESENCE, ASK_PRESENCE)
    match role:
        case "client":
            return Permissions(
                publish=(*_CLIENT_DOOR, "$SRV.>"),
                subscribe=(f"{INBOX_PREFIX}.>", f"{INBOX_PREFIX}_client.>"),
            )
        case "gateway":
            return Permissions(
                publish=(
                    f"{mesh}.worker.*", f"{mesh}.pager.*", f"{mesh}.gateway.*", *presence,
                    f"{INBOX_PREFIX}.>", f"{INBOX_PREFIX}_client.>",
                ),
                subscribe=(
                    *_CLIENT_DOOR, "$SRV.>", f"{mesh}.gateway.*", f"{mesh}.pages.*",
                    *presence, f"{INBOX_PREFIX}_gateway.>",
                ),
            )  # fmt: skip
        case "prefill" | "decode":
            return Permissions(
                publish=(f"{mesh}.worker.*", f"{mesh}.pager.*", f"{mesh}.gateway.*", *presence),
                subscribe=(
                    f"{mesh}.worker.*", f"{mesh}.inspect.*", *presence, f"{INBOX_PREFIX}_{role}.>",
                ),
            )  # fmt: skip
        case "pager":
            return Permissions(
                publish=(f"{mesh}.worker.*", f"{mesh}.pager.*", f"{mesh}.pages.*", *presence),
                subscribe=(
                    f"{mesh}.pager.*", f"{mesh}.report.*", f"{CACHE_PREFIX}.>", "$SRV.>",
                    *presence, f"{INBOX_PREFIX}_pager.>",
                ),
            )  # fmt: skip
        case "operator":
            return Permissions(
                publish=(
                    f"{mesh}.report.*", f"{mesh}.inspect.*", f"{CACHE_PREFIX}.>", "$SRV.>",
                    ASK_PRESENCE,
                ),
                subscribe=(PRESENCE, f"{INBOX_PREFIX}_operator.>"),
            )  # fmt: skip


def tenant_permissions(tenant: str) -> Permissions:
    """Permissions of one tenant's clients, which can hear no other client's answers. Their inbox
    prefix is ``inbox_prefix("client", tenant)``."""
    return Permissions(
        publish=permissions("client").publish,
        subscribe=(f"{inbox_prefix('client', tenant)}.>",),
    )
