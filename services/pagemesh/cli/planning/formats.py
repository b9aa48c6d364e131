"""How many bits K and V take, in the formats that can be planned for.

The page size of a format that the engine supports comes from ``kernels.layout``. For any other, a
page of the same shape is computed, scales included, and the plan says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagemesh.kernels.layout import (
    KV_DTYPES,
    PAGE_ALIGN_BYTES,
    SCALE_BYTES,
    KvDtype,
    PageLayout,
)
from pagemesh.wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KvFormat:
    """``value_bits`` per element, and ``scale_bits`` per block of ``block`` elements (0: the head's
    width, so one scale per slot, head, and K or V)."""

    name: str
    value_bits: int
    scale_bits: int
    block: int
    finite_max: float
    """The largest value that can be stored, before scaling."""

    @property
    def served(self) -> bool:
        """Whether the engine supports pages of this format."""
        return self.name in KV_DTYPES

    def bits(self, head_dim: int) -> float:
        """Bits per element, with its share of the scale."""
        return self.value_bits + self.scale_bits / (self.block or head_dim)


FORMATS = {
    each.name: each
    for each in (
        KvFormat("float32", 32, 0, 0, 3.4028234663852886e38),
        KvFormat("float16", 16, 0, 0, 65_504.0),
        KvFormat("bfloat16", 16, 0, 0, 3.3895313892515355e38),
        KvFormat("e4m3", 8, 8 * SCALE_BYTES, 0, 448.0),
        KvFormat("e5m2", 8, 8 * SCALE_BYTES, 0, 57_344.0),
        KvFormat("int8", 8, 8 * SCALE_BYTES, 0, 127.0),
        KvFormat("nvfp4", 4, 8, 16, 6.0),
    )
}
_ALIASES = {
    "fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16",
    "fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2", "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2", "fp4": "nvfp4",
}  # fmt: skip


def find_format(name: str, origin: str) -> KvFormat:
    """The format called ``name``. Raises ``ConfigError`` that names ``origin``."""
    found = FORMATS.get(_ALIASES.get(name.lower(), name.lower()))
    if found is None:
        raise ConfigError(
            f"{origin}={name[:40]!r} is not one of {', '.join(FORMATS)} (or fp32, fp16, bf16, fp8)"
        )
    return found


def page_bytes(kv: KvFormat, *, layers: int, kv_heads: int, head_dim: int, page_size: int) -> int:
    """Bytes of one page. Raises ``ValueError`` for shapes that the kernels do not support."""
    if kv.served:
        served: KvDtype = kv.name  # type: ignore[assignment]
        return PageLayout(layers, kv_heads, head_dim, page_size, served).page_bytes
    layout = PageLayout(layers, kv_heads, head_dim, page_size)
    elements = layout.layers * layout.layer_stride
    used_bits = elements * kv.value_bits + elements // (kv.block or head_dim) * kv.scale_bits
    return -(-used_bits // (8 * PAGE_ALIGN_BYTES)) * PAGE_ALIGN_BYTES
