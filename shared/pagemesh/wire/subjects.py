"""Every NATS subject, in one place; permissions are derived from the same lines.

pagemesh.v1.chat.completions      client door (OpenAI JSON), queue group "gateway"
pagemesh.v1.completions
pagemesh.v1.models
pagemesh.v1.pages.VERB              operators' door (JSON), every pager; VERB.HOST: that one
pagemesh.mesh.v1.pager.HOST                 requests to the pager of a host
pagemesh.mesh.v1.pages.HOST                 its stream of PagesChanged
pagemesh.mesh.v1.worker.NAME                requests and notices to a worker
pagemesh.mesh.v1.gateway.NAME               Frames to a gateway
pagemesh.mesh.v1.gateway.=HASH              clients' calls to a model, from gateways of others;
                                            queue group "gateway"
pagemesh.mesh.v1.presence                   Announce
pagemesh.mesh.v1.ask                        AskPresence
pagemesh.mesh.v1.report.HOST                InspectPager
pagemesh.mesh.v1.inspect.NAME               InspectWorker

What is only asked has subjects of its own, since permissions know subjects and not messages:
whoever watches may ask, and can neither announce a service nor move a page. What operators may
have done to the cache has others, which no client may use.
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
"""Of a subject to send to or to listen on."""


def pager(host: str) -> str:
    return f"{MESH_PREFIX}.pager.{host}"


def pager_report(host: str) -> str:
    return f"{MESH_PREFIX}.report.{host}"


def worker_report(name: str) -> str:
    return f"{MESH_PREFIX}.inspect.{name}"


def cache_door(verb: str, host: str = "") -> str:
    """Where operators ask ``host``'s pager, or without a host all of them."""
    return ".".join(part for part in (CACHE_PREFIX, verb, host) if part)


def pages(host: str) -> str:
    return f"{MESH_PREFIX}.pages.{host}"


def worker(name: str) -> str:
    return f"{MESH_PREFIX}.worker.{name}"


def gateway(name: str) -> str:
    return f"{MESH_PREFIX}.gateway.{name}"


def gateways_of(model: str) -> str:
    """Those that serve ``model``. What follows the ``=`` is no service's name, and one token
    whatever the model is called."""
    return f"{MESH_PREFIX}.gateway.={blake2b(model.encode(), digest_size=16).hexdigest()}"


def inbox_prefix(role: str, name: str) -> str:
    """Each service has inboxes of its own, so that permissions can keep others out. The name
    is a token by itself, since a wildcard only ever stands for whole tokens."""
    return f"{INBOX_PREFIX}_{role}.{name}"


def is_subject(subject: str) -> bool:
    """Whether it can be sent to: no wildcard, no empty token, nothing that NATS has no way to
    write."""
    tokens = subject.split(".")
    whole = len(subject) <= SUBJECT_BYTES_MAX and SUBJECT.fullmatch(subject) is not None
    return whole and all(tokens) and not {"*", ">"} & {*tokens}


def may_be_answered(reply: str, *, operators: bool = False) -> bool:
    """Whether a service may answer a client there, or with ``operators`` one of those: in any
    inbox of theirs, but neither on a subject that services listen on nor in an inbox of a service,
    since its word counts more than a client's. Nor where one of these is written in other cases:
    the server refuses that, and nats-py tells the refusal in lower case, as that of the real one.
    """
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
"""First tokens, in lower case, of what services listen on and of inboxes that are someone's."""


def permissions(role: BusRole) -> Permissions:
    """NATS permissions of a role; ``allow_responses`` lets every service answer inboxes.

    A ``client`` may be any NATS client, with its default inboxes; none of our services' begin
    so. Clients that must not hear each other are tenants (``tenant_permissions``).
    An ``operator`` watches (presence, reports of pagers and workers) and keeps the cache.
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
    """Permissions of one tenant's clients: they hear nobody's answers but their own. Their
    inbox prefix is ``inbox_prefix("client", tenant)``."""
    return Permissions(
        publish=permissions("client").publish,
        subscribe=(f"{inbox_prefix('client', tenant)}.>",),
    )
