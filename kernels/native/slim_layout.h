// bfloat16 weights in twelve bits, to the bit: the sign and the upper seven bits of the exponent as
// one of sixteen codes, the other eight bits as they are. A panel has codes of its own, for either
// sign of the eight pairs of exponents that are most frequent in it; what has another exponent is
// a stray and stands in a list. Weights lie so closely around zero that there is hardly any.
//
//   panel   head, strays, then groups of eight values of K
//   group   lower bytes of K 0 to 3 and of K 4 to 7, sixty-four each; then sixty-four bytes with
//           the codes of K 0 to 3 in their lower halves and of K 4 to 7 in their upper ones
//   sixty-four bytes   of four values of K: four lanes of sixteen, a lane of four columns, K by K
//
// so that whatever is as wide as a lane or a multiple of it decodes by two interleavings, and has
// columns in order.
#pragma once

#include <stdint.h>

namespace pm {
namespace {  // compiled once for each level, and no level's code may stand in for another's

constexpr long kSlimDepth = 8;  // values of K in a group
constexpr long kSlimGroupBytes = 192, kSlimCodesAt = 128;
constexpr int kSlimUppers = 8;  // pairs of exponents

struct SlimHead {
  uint8_t uppers[2 * kSlimUppers];  // upper byte of a bfloat16, by code; those below zero last
  uint32_t stray_count;
  uint8_t unused[44];
};

struct SlimStray {
  uint32_t at;    // 16 * K + column, ascending
  uint32_t bits;  // of a float32
};

constexpr long kSlimHeadBytes = sizeof(SlimHead);

// Strays that a panel has room for: one of 512 values or a few more.
inline long slim_strays_max(long k) { return (k + 255) / 256 * 8; }

inline long slim_groups_at(long k) {
  return kSlimHeadBytes + slim_strays_max(k) * static_cast<long>(sizeof(SlimStray));
}

inline long slim_panel_bytes(long k) {
  return slim_groups_at(k) + k / kSlimDepth * kSlimGroupBytes;
}

}  // namespace
}  // namespace pm
