"""The NATS services protocol: ``$SRV.PING``, ``$SRV.INFO`` and ``$SRV.STATS``, each alone, with
a service's name, and with its name and id. So ``nats service ls`` and every client library
find our doors. (The protocol is ADR-32 of nats-io/nats-architecture-and-design.)

Endpoints report what they did through ``record``; error texts never leave the process, only
fault codes do.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from pagemesh.runtime.actor import Actor, Behaviour
from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.wire.subjects import may_be_answered

API_PREFIX = "$SRV"
VERBS = ("PING", "INFO", "STATS")
ERROR_CODE_HEADER = "nats-service-error-code"
ERROR_HEADER = "nats-service-error"
INBOX_COUNT_MAX = 256


@dataclass(frozen=True, slots=True)
class Endpoint:
    name: str
    subject: str
    queue: str


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    """``name``: letters, digits, ``-`` and ``_``; ``version``: semantic."""

    name: str
    version: str
    description: str
    endpoints: tuple[Endpoint, ...]


def semantic(version: str) -> str:
    """``version`` as the protocol wants it: three numbers."""
    numbers = [part for part in version.split(".") if part.isdigit()][:3]
    return ".".join([*numbers, "0", "0", "0"][:3])


@dataclass(slots=True)
class _Counts:
    requests: int = 0
    errors: int = 0
    last_error: str = ""
    duration_us: int = 0


class Discovery(Behaviour[Delivery]):
    """Use ``discoverable``."""

    def __init__(self, facts: ServiceFacts, metadata: Mapping[str, str]) -> None:
        self.facts = facts
        self.id = secrets.token_hex(11)
        self._metadata = dict(metadata)
        self._started = datetime.datetime.now(datetime.UTC)
        self._counts = {endpoint.name: _Counts() for endpoint in facts.endpoints}

    def record(self, endpoint: str, *, duration_us: int, error: str = "") -> None:
        """Count a request to ``endpoint``; ``error`` is a fault's code, empty when it went
        well. Raises ``KeyError`` for an endpoint that is not of this service."""
        counts = self._counts[endpoint]
        counts.requests += 1
        counts.duration_us += duration_us
        if error:
            counts.errors += 1
            counts.last_error = error

    def subjects(self) -> list[str]:
        name = self.facts.name
        tails = ("", f".{name}", f".{name}.{self.id}")
        return [f"{API_PREFIX}.{verb}{tail}" for verb in VERBS for tail in tails]

    async def handle(self, event: Delivery) -> None:
        verb = event.subject.split(".")[1]
        event.respond(json.dumps(self._body(verb)).encode())

    def _body(self, verb: str) -> dict[str, object]:
        body: dict[str, object] = {
            "type": f"io.nats.micro.v1.{verb.lower()}_response",
            "name": self.facts.name,
            "id": self.id,
            "version": self.facts.version,
            "metadata": self._metadata,
        }
        if verb == "INFO":
            body["description"] = self.facts.description
            body["endpoints"] = [_place(endpoint) for endpoint in self.facts.endpoints]
        elif verb == "STATS":
            body["started"] = self._started.isoformat().replace("+00:00", "Z")
            body["endpoints"] = [
                _place(endpoint) | _work(self._counts[endpoint.name])
                for endpoint in self.facts.endpoints
            ]
        return body


def _place(endpoint: Endpoint) -> dict[str, object]:
    return {
        "name": endpoint.name,
        "subject": endpoint.subject,
        "queue_group": endpoint.queue,
        "metadata": {},
    }


def _work(counts: _Counts) -> dict[str, object]:
    return {
        "num_requests": counts.requests,
        "num_errors": counts.errors,
        "last_error": counts.last_error,
        "processing_time": counts.duration_us * 1_000,
        "average_processing_time": counts.duration_us * 1_000 // max(1, counts.requests),
    }


@contextlib.asynccontextmanager
async def discoverable(
    bus: Bus, facts: ServiceFacts, *, metadata: Mapping[str, str] | None = None
) -> AsyncIterator[Discovery]:
    """Answer discovery for as long as the context lasts. The endpoints' own subscriptions are
    the caller's business."""
    discovery = Discovery(facts, metadata or {})
    actor: Actor[Delivery] = Actor(
        f"discovery-{facts.name}", lambda: discovery, inbox_count_max=INBOX_COUNT_MAX
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(actor.run(), name=actor.name)

        def admit(delivery: Delivery) -> None:
            """Anybody may ask, so an answer must not go to a subject of a service."""
            if may_be_answered(delivery.reply, operators=True):
                actor.admit(delivery)

        made = [await bus.subscribe(subject, admit) for subject in discovery.subjects()]
        try:
            yield discovery
        finally:
            for subscription in made:
                await bus.unsubscribe(subscription)
            actor.stop()
