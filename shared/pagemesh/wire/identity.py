"""Identity: which tokens may ever share KV pages, and how prefixes are named outside the pager.

``model_root`` digests everything that decides what a page of KV means; ``tenant_root`` adds
the tenant's salt and is the root of one prefix tree. Both are SHA-256 over a canonical,
typed, length-prefixed encoding, so that no two different tuples share an encoding.

``prefix_keys`` names cached prefixes to routers: keyed, chained 64-bit ids from which
neither tokens nor other tenants' prefixes can be guessed without the secret. They are hints;
the tree itself compares tokens.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

IDENTITY_VERSION = 2
_ROOTS_MAX = 4_096
Field = str | int | bytes | bool


def canonical(fields: dict[str, Field]) -> bytes:
    """A typed, length-prefixed encoding of ``fields`` in sorted order."""
    out = bytearray()
    for name in sorted(fields):
        value = fields[name]
        if isinstance(value, bool):
            tag, body = b"b", (b"\x01" if value else b"\x00")
        elif isinstance(value, int):
            tag, body = b"i", str(value).encode()
        elif isinstance(value, str):
            tag, body = b"s", value.encode()
        else:
            tag, body = b"y", value
        key = name.encode()
        out += len(key).to_bytes(4, "little") + key
        out += tag + len(body).to_bytes(8, "little") + body
    return bytes(out)


def model_root(
    *,
    weights: bytes,
    adapter: bytes,
    tokenizer: bytes,
    positions: str,
    kv_dtype: str,
    kv_scales: bytes,
    layout: bytes,
    page_size: int,
    arithmetic: str,
) -> bytes:
    """The 32-byte identity of one model as loaded. ``positions`` is the position-encoding
    config as canonical JSON; an absent adapter or absent scales are empty bytes. ``arithmetic``
    identifies what computes, if results must agree to the last bit; empty otherwise."""
    fields: dict[str, Field] = {
        "version": IDENTITY_VERSION,
        "weights": weights,
        "adapter": adapter,
        "tokenizer": tokenizer,
        "positions": positions,
        "kv_dtype": kv_dtype,
        "kv_scales": kv_scales,
        "layout": layout,
        "page_size": page_size,
        "arithmetic": arithmetic,
    }
    return hashlib.sha256(canonical(fields)).digest()


@functools.lru_cache(maxsize=_ROOTS_MAX)
def tenant_root(model: bytes, salt: bytes) -> bytes:
    """The 32-byte root of a tenant's prefix tree under ``model`` (a ``model_root``)."""
    fields: dict[str, Field] = {"version": IDENTITY_VERSION, "model": model, "salt": salt}
    return hashlib.sha256(canonical(fields)).digest()


def prefix_keys(
    secret: bytes, root: bytes, tokens: NDArray[np.uint32], page_size: int, *, parent: int = 0
) -> NDArray[np.uint64]:
    """One keyed id per full page of ``tokens``: id i names root + pages 0..i.

    ``parent`` continues a chain: the id of the page before ``tokens``, 0 at the start.
    """
    chain = _packed_chain(secret, root, tokens, page_size, parent)
    return np.frombuffer(b"".join(chain), "<u8")


def key_chain(
    secret: bytes, root: bytes, tokens: NDArray[np.uint32], page_size: int, *, parent: int = 0
) -> Iterator[int]:
    """``prefix_keys``, computed lazily: a look-up ends at the first unknown page, which for most
    prompts comes long before the last."""
    for key in _packed_chain(secret, root, tokens, page_size, parent):
        yield int.from_bytes(key, "little")


def _packed_chain(
    secret: bytes, root: bytes, tokens: NDArray[np.uint32], page_size: int, parent: int
) -> Iterator[bytes]:
    data = tokens.astype("<u4", copy=False).tobytes()
    width, key = 4 * page_size, parent.to_bytes(8, "little")
    start_hash = hashlib.blake2b(root, digest_size=8, key=_short(secret))  # copying is faster
    for start in range(0, len(data) - width + 1, width):
        page_hash = start_hash.copy()
        page_hash.update(key + data[start : start + width])
        key = page_hash.digest()
        yield key


def secret_tag(secret: bytes) -> int:
    """A 64-bit fingerprint by which services notice that their secrets differ. It does not reveal
    the secret."""
    tag = hashlib.blake2b(b"which secret", digest_size=2, key=_short(secret)).digest()
    return 1 + int.from_bytes(tag, "little")


def _short(secret: bytes) -> bytes:
    """``secret`` as a BLAKE2b key: too long a one is hashed first, as in HMAC (RFC 2104)."""
    if len(secret) <= hashlib.blake2b.MAX_KEY_SIZE:
        return secret
    return hashlib.blake2b(secret).digest()


def page_digests(key: bytes, root: bytes, tokens: bytes, page_size: int) -> Iterator[bytes]:
    """A keyed 32-byte digest for each full page of packed ``tokens``, which start at the root. It
    covers the root and all tokens up to the page's end, and is what identifies pages that have
    left the process that computed them. ``key``: 1 to 64 bytes."""
    width, digest = 4 * page_size, root
    for start in range(0, len(tokens) - width + 1, width):
        digest = hashlib.blake2b(
            digest + tokens[start : start + width], digest_size=32, key=key
        ).digest()
        yield digest
