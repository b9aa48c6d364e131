"""API keys, tenants and their salts.

A tenant's salt decides which cached pages its prompts may share. It is derived from the server's
secret, so that nobody can compute another tenant's; a client's own ``cache_salt`` narrows it
further and can never widen it.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from functools import lru_cache

from pagemesh.gateway.doors.tenant_limits import (
    EVERYBODY_ELSE,
    NO_LIMITS,
    TENANT_CHARACTERS_MAX,
    TenantLimits,
    parse_limits,
)
from pagemesh.wire.errors import ConfigError
from pagemesh.wire.identity import canonical

KEY_CHARACTERS_MIN = 16
KEYS_MAX = 10_000
SALTS_MAX = 1_024
"""Salts that are remembered: looking up the hash in its library takes longer than computing it."""
ANYBODY = "anybody"
"""The one tenant of a gateway that asks for no key."""


@dataclass(frozen=True, slots=True)
class _Key:
    digest: bytes
    tenant: str


class Tenants:
    """Parses ``name:key,name:key`` (a bare key is its own tenant). Raises ``ConfigError`` for a key
    that is empty, short or given twice. Without any key, everybody may ask. ``limits``: see
    ``tenant_limits``."""

    def __init__(self, keys: str, secret: bytes, limits: str = "") -> None:
        self._limits = parse_limits(limits)
        self._secret = secret
        self._salts = lru_cache(SALTS_MAX)(self._make_salt)
        self._keys = [_parse(part.strip()) for part in keys.split(",")] if keys.strip() else []
        if len(self._keys) > KEYS_MAX:
            raise ConfigError(f"PAGEMESH_API_KEYS has more than {KEYS_MAX} keys")
        if len({key.digest for key in self._keys}) < len(self._keys):
            raise ConfigError("PAGEMESH_API_KEYS has the same key twice")

    @property
    def open_to_all(self) -> bool:
        return not self._keys

    def tenant_of(self, key: str) -> str | None:
        """The tenant that ``key`` belongs to; None: nobody's. Takes the same time for every
        key of a length: all digests are compared."""
        if self.open_to_all:
            return ANYBODY
        digest = hashlib.sha256(key.encode("utf-8", "replace")).digest()
        found: str | None = None
        for known in self._keys:
            if hmac.compare_digest(digest, known.digest):
                found = known.tenant
        return found

    def limits_of(self, tenant: str) -> TenantLimits:
        """The limits of ``tenant``: its own, or those of everybody else."""
        return self._limits.get(tenant) or self._limits.get(EVERYBODY_ELSE) or NO_LIMITS

    @property
    def _names(self) -> set[str]:
        return {key.tenant for key in self._keys} or {ANYBODY}

    @property
    def without_a_share(self) -> list[str]:
        """Tenants to whose cache the shares of the others leave no room in the pool. Quotas in
        pages do not count here: only the pager knows what they leave."""
        shares = {name: one.pool_share for name, one in self._limits.items()}
        shares.pop(EVERYBODY_ELSE, None)
        if round(sum(shares.values()), 6) < 1.0:
            return []
        limits = {name: self.limits_of(name) for name in self._names}
        return sorted(name for name, one in limits.items() if not (one.pool_share or one.pages_max))

    @property
    def limited_nobody(self) -> list[str]:
        """Tenants that have limits but no key, so that their limits apply to nobody. Without any
        keys, the only tenant is ``ANYBODY``."""
        return sorted(self._limits.keys() - self._names - {EVERYBODY_ELSE})

    def salt(self, tenant: str, cache_salt: str) -> bytes:
        """32 bytes for ``identity.tenant_root``."""
        return self._salts(tenant, cache_salt)

    def _make_salt(self, tenant: str, cache_salt: str) -> bytes:
        message = canonical({"tenant": tenant, "cache_salt": cache_salt})
        return hmac.digest(self._secret, message, "sha256")


def bearer(authorization: str) -> str:
    """The key in an ``Authorization`` header; empty: there is none."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _parse(text: str) -> _Key:
    name, colon, key = text.partition(":")
    if not colon:
        name, key = "", text
    if len(key) < KEY_CHARACTERS_MIN:
        shown = f"the key of {name!r}" if name else "a key"
        raise ConfigError(
            f"PAGEMESH_API_KEYS: {shown} is shorter than {KEY_CHARACTERS_MIN} characters; "
            "make one with: openssl rand -hex 32"
        )
    if len(name) > TENANT_CHARACTERS_MAX:
        raise ConfigError(
            f"PAGEMESH_API_KEYS: {name[:20]!r}... has more than {TENANT_CHARACTERS_MAX} "
            "characters; give the tenant a shorter name"
        )
    digest = hashlib.sha256(key.encode()).digest()
    return _Key(digest, name or f"key-{digest.hex()[:16]}")
