"""Answers kept for a while by the client's own idempotency key. Pure.

    (new) --begin--> RUNNING --finish--> DONE --old or too many--> (new)
                        |
                        +--abandon--> (new)

A second call with a key that is running is told so (409; SDKs ask again by themselves); one
that is done gets the same answer again, and nothing is generated twice. A streamed answer is
not kept: its key stays used.
"""

from __future__ import annotations

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


class IdempotencyStore:
    """Bounded by entries, by bytes of answers, and by age."""

    def __init__(
        self,
        *,
        entries_max: int = 4_096,
        bytes_max: int = 32 << 20,
        age_ms_max: int = 600_000,
    ) -> None:
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self._age_ms_max = age_ms_max
        self._bytes = 0
        self._entries: dict[tuple[str, str], _Entry] = {}

    def begin(self, tenant: str, key: str, body_digest: bytes, now_ms: int) -> bytes | None:
        """The answer that was given already, or None: go ahead, then ``finish`` or
        ``abandon``. Raises ``ApiError`` when the key is running or was used otherwise."""
        if not key or len(key) > KEY_CHARACTERS_MAX or not key.isprintable():
            raise ApiError(400, "the idempotency key is empty, too long or unprintable", HEADER)
        self._expire(now_ms)
        entry = self._entries.get((tenant, key))
        if entry is None:
            if len(self._entries) >= self._entries_max and not self._drop_one():
                raise ApiError(429, "too many idempotency keys in use", retry_after_ms=1_000)
            self._entries[tenant, key] = _Entry(body_digest, now_ms)
            return None
        if entry.body_digest != body_digest:
            raise ApiError(400, "the idempotency key was used with another body", HEADER)
        if not entry.done:
            message = "a request with this idempotency key is running"
            raise ApiError(409, message, HEADER, "idempotency_key_in_use", retry_after_ms=1_000)
        if entry.answer is None:
            message = "a request with this idempotency key was answered as a stream"
            raise ApiError(400, message, HEADER, "idempotency_key_used")
        return entry.answer

    def finish(self, tenant: str, key: str, answer: bytes | None) -> None:
        """The call was answered; None: as a stream."""
        entry = self._entries.get((tenant, key))
        if entry is None:
            return
        entry.done = True
        entry.answer = answer
        self._bytes += len(answer or b"")
        while self._bytes > self._bytes_max and self._drop_one():
            pass

    def abandon(self, tenant: str, key: str) -> None:
        """The call failed or its client left: the key is free again."""
        entry = self._entries.get((tenant, key))
        if entry is not None and not entry.done:
            del self._entries[tenant, key]

    def check(self) -> None:
        assert len(self._entries) <= self._entries_max
        assert self._bytes == sum(len(entry.answer or b"") for entry in self._entries.values())

    def _expire(self, now_ms: int) -> None:
        for name, entry in list(self._entries.items()):
            if now_ms - entry.since_ms <= self._age_ms_max:
                break  # entries are in order of age
            if entry.done:
                self._drop(name)

    def _drop_one(self) -> bool:
        """Forget the oldest finished entry; False: there is none."""
        name = next((name for name, entry in self._entries.items() if entry.done), None)
        if name is not None:
            self._drop(name)
        return name is not None

    def _drop(self, name: tuple[str, str]) -> None:
        self._bytes -= len(self._entries.pop(name).answer or b"")
