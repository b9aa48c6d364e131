// Slim weights: bfloat16 in twelve bits, without loss. The sign and the upper seven bits of the
// exponent become one of sixteen codes, the other eight bits are kept. Each panel has its own
// codes, for both signs of its eight most frequent pairs of exponents; a weight with another
// exponent is a stray, kept in a list. Weights are so concentrated around zero that there are
// hardly any.
//
//   panel   head, strays, then groups of eight values of K
//   group   lower bytes of K 0 to 3 and of K 4 to 7, 64 each; then 64 bytes with the codes of
//           K 0 to 3 in their lower halves and of K 4 to 7 in their upper halves
//   64 bytes, of four values of K   four lanes of 16 bytes, each of four columns: the second and
//                                   the first value of K side by side, column by column, then the
//                                   fourth and the third
//
// so that vectors as wide as a lane, or a multiple of it, are decoded by one interleaving, which
// gives pairs of bfloat16s, as pairs.h has them, with their columns in order.
#pragma once

#include <stdint.h>

namespace pm {
namespace {  // compiled once per level, and not to be merged with another level's

constexpr long kSlimDepth = 8;  // values of K in a group
constexpr long kSlimGroupBytes = 192, kSlimCodesAt = 128;
constexpr int kSlimUppers = 8;  // pairs of exponents

// Where the byte of a column stands among the 64 of four values of K.
constexpr long slim_place(long row, long column) {
  return column / 4 * 16 + row / 2 * 8 + column % 4 * 2 + 1 - row % 2;
}

struct SlimHead {
  uint8_t uppers[2 * kSlimUppers];  // upper byte of a bfloat16, by code; negative ones last
  uint32_t stray_count;
  uint8_t unused[44];
};

struct SlimStray {
  uint32_t at;    // 16 * K + column, ascending
  uint32_t bits;  // of a float32
};

constexpr long kSlimHeadBytes = sizeof(SlimHead);

// Strays that a panel has room for: one in 512 values, rounded up.
inline long slim_strays_max(long k) { return (k + 255) / 256 * 8; }

inline long slim_groups_at(long k) {
  return kSlimHeadBytes + slim_strays_max(k) * static_cast<long>(sizeof(SlimStray));
}

inline long slim_panel_bytes(long k) {
  return slim_groups_at(k) + k / kSlimDepth * kSlimGroupBytes;
}

}  // namespace
}  // namespace pm
