"""Answers kept for a while by the client's own idempotency key. Pure.

    (new) --begin--> RUNNING --finish--> DONE --old or too many--> (new)
                        |
                        +--abandon--> (new)

A second call with the key of a running one gets 409 (SDKs retry by themselves). With the key of one
that is done it gets the same answer again, and nothing is generated twice. A streamed or large
answer is not kept, but its key stays used. When there are too many, the tenant with the most loses
its oldest first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pagemesh.gateway.api.api_errors import ApiError

KEY_CHARACTERS_MAX = 255
HEADER = "idempotency-key"


@dataclass(slots=True)
class _Entry:
    body_digest: bytes
    since_ms: int
    answer: bytes | None = None
    done: bool = False
    unkept_why: str = ""


class IdempotencyStore:
    """Bounded by entries, by bytes of each answer and of all, and by age."""

    def __init__(
        self,
        *,
        entries_max: int = 4_096,
        bytes_max: int = 32 << 20,
        answer_bytes_max: int = 2 << 20,
        age_ms_max: int = 600_000,
    ) -> None:
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self._answer_bytes_max = answer_bytes_max
        self._age_ms_max = age_ms_max
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._bytes_of: Counter[str] = Counter()
        self._done_of: Counter[str] = Counter()
        """By tenant, of finished entries."""

    def begin(self, tenant: str, key: str, body_digest: bytes, now_ms: int) -> bytes | None:
        """The answer that was given already, or None: go ahead, then ``finish`` or ``abandon``.
        Raises ``ApiError`` when the key is in use, was used for something else or is malformed."""
        if not key or len(key) > KEY_CHARACTERS_MAX or not key.isprintable():
            raise ApiError(400, "the idempotency key is empty, too long or not printable", HEADER)
        self._expire(now_ms)
        entry = self._entries.get((tenant, key))
        if entry is None:
            if len(self._entries) >= self._entries_max and not self._drop_one(self._done_of):
                raise ApiError(429, "too many idempotency keys in use", retry_after_ms=1_000)
            self._entries[tenant, key] = _Entry(body_digest, now_ms)
            return None
        if entry.body_digest != body_digest:
            message = "the idempotency key was used with a different body"
            raise ApiError(400, message, HEADER, "idempotency_key_used")
        if not entry.done:
            message = "a request with this idempotency key is still running"
            raise ApiError(409, message, HEADER, "idempotency_key_in_use", retry_after_ms=1_000)
        if entry.answer is None:
            message = f"a request with this idempotency key {entry.unkept_why}; use another key"
            raise ApiError(400, message, HEADER, "idempotency_key_used")
        return entry.answer

    def finish(self, tenant: str, key: str, answer: bytes | None) -> None:
        """The call was answered; None if as a stream."""
        entry = self._entries.get((tenant, key))
        if entry is None:
            return
        if answer is None:
            entry.unkept_why = "was answered as a stream"
        elif len(answer) > self._answer_bytes_max:
            entry.unkept_why = f"had an answer above {self._answer_bytes_max} bytes"
        else:
            entry.answer = answer
        entry.done = True
        self._count(tenant, entry, 1)
        while self._bytes_of.total() > self._bytes_max and self._drop_one(self._bytes_of):
            pass

    def abandon(self, tenant: str, key: str) -> None:
        """The call failed or its client left: the key is free again."""
        entry = self._entries.get((tenant, key))
        if entry is not None and not entry.done:
            del self._entries[tenant, key]

    def check(self) -> None:
        assert len(self._entries) <= self._entries_max
        size = sum(len(entry.answer or b"") for entry in self._entries.values())
        done = Counter(tenant for (tenant, _), entry in self._entries.items() if entry.done)
        assert self._done_of == done and self._bytes_of.total() == size

    def _expire(self, now_ms: int) -> None:
        for name, entry in list(self._entries.items()):
            if now_ms - entry.since_ms <= self._age_ms_max:
                break  # entries are in order of age
            if entry.done:
                self._drop(name)

    def _drop_one(self, weights: Counter[str]) -> bool:
        """Forget the oldest finished entry of the tenant with the largest weight; False: there is
        none."""
        if not weights:
            return False
        heaviest = max(weights, key=weights.__getitem__)
        its = (name for name, one in self._entries.items() if one.done and name[0] == heaviest)
        self._drop(next(its))
        return True

    def _drop(self, name: tuple[str, str]) -> None:
        self._count(name[0], self._entries.pop(name), -1)

    def _count(self, tenant: str, entry: _Entry, sign: int) -> None:
        size = sign * len(entry.answer or b"")
        for weights, change in ((self._bytes_of, size), (self._done_of, sign)):
            weights[tenant] += change
            if not weights[tenant]:
                del weights[tenant]
