// A product out = x * weight^T + bias, how it is divided into units of work, and how its sums are
// finished (linear.h).
#pragma once

#include "pairs.h"

namespace {

// Up to kStreamRows rows read a weight once. Of float32 weights, whose blocks need no decoding, up
// to kWideStreamRows do, since with more rows tiles leave memory more time. Two panels may be read
// side by side, as a pair: they share the loads of the rows, and there are two streams from memory
// and twice as many independent chains of multiply-adds. Pairs are read for up to kNarrowPairRows
// rows of narrow weights, which a single chain would hold up, and for as many rows as registers
// allow (kPairRows) if threads have enough pairs.
//
// kBlockDepth: values of K in a block. For few rows a block is shorter (kShortDepth), so that it
// stays in L1 from tile to tile. A long block stores its sums less often, and data from L2 arrives
// in time where tiles are as large as registers allow. The rows of a unit should stay in L2, if it
// has 512 KiB.
#if PM_LEVEL >= 2
constexpr int kStreamRows = 16, kPairRows = 14, kNarrowPairRows = 4, kTileRows = 8, kTilePanels = 3;
constexpr long kBlockDepth = 640, kUnitRowsLeast = 256;
constexpr int kWideStreamRows = kPairRows;
constexpr int kSlimStreamRows = kStreamRows;  // of slim weights, whose decoding needs registers
#elif PM_LEVEL == 1
constexpr int kStreamRows = 6, kPairRows = 0, kNarrowPairRows = 2, kTileRows = 6, kTilePanels = 1;
constexpr long kBlockDepth = 640, kUnitRowsLeast = 128;
constexpr int kWideStreamRows = kStreamRows;
constexpr int kSlimStreamRows = 5;
#else
constexpr int kStreamRows = 2, kPairRows = 0, kNarrowPairRows = 1, kTileRows = 2, kTilePanels = 1;
constexpr long kBlockDepth = 192, kUnitRowsLeast = 256;
constexpr int kWideStreamRows = kStreamRows;
constexpr int kSlimStreamRows = kStreamRows;
#endif
constexpr long kShortDepth = 192, kShortRows = 64;  // depth of a block, for up to kShortRows rows
constexpr long kUnitRows = (kUnitRowsLeast + kTileRows - 1) / kTileRows * kTileRows;  // whole tiles
constexpr long kUnitPanels = 12;
constexpr long kPairsPerThread = 8;
constexpr long kAheadLines = 64;  // prefetch distance of a stream; 16 rows take 8 cycles a line
// kSerialWork, some 80 us of work: below it one thread is enough (see parallel.h). In multiply-adds
// with weights in cache; reading a weight costs as much as kWeightWork of them.
constexpr long kSerialWork = 1 << 23, kWeightWork = 8;

// The form of a call's rows, `x`.
enum class RowForm {
  kPlain,    // float32
  kRounded,  // float32, rounded to values of bfloat16
  kPaired,   // two bfloat16s per lane (pairs.h)
  kTiled,    // for matrix tiles (tiles.h)
};

struct LinearCall {
  const float* x;
  long x_stride;  // in lanes
  Weights weights;
  const float* bias;  // or null
  float* out;
  long out_stride;
  long rows, n, k;
  bool add;   // adds to what `out` holds
  bool hold;  // leaves the sums in the carry, unfinished
  RowForm form = RowForm::kPlain;
};

// Calls body(M{}) with the type that multiplies the rows of a call by weights, see pairs.h.
template <typename Body>
inline auto with_rows_of(const LinearCall& call, Body body) {
#if PM_LEVEL >= 3
  if (call.form == RowForm::kPaired) return body(BfloatPairs{});
#endif
  (void)call;
  return body(Floats{});
}

// How a product is divided into units of work.
struct LinearPlan {
  long panels;
  long unit_panels, unit_rows;
  long row_blocks;  // units that share the same panels
  long units;
  long apart;  // panels from one to the next of those that a unit reads together
};

inline long pieces(long whole, long part) { return (whole + part - 1) / part; }

// Whether `rows` are so few that they read `weights` once (linear_stream.h).
inline bool in_stream(long rows, const Weights& weights) {
  if (!weights.narrow()) return rows <= kWideStreamRows;
  return rows <= (weights.slim() ? kSlimStreamRows : kStreamRows);
}

// Whether a stream reads its panels in pairs; `pairs`: how many there would be. If they are few,
// their uneven division among threads costs more than pairs gain.
inline bool in_pairs(long rows, long pairs, const Weights& weights, int threads) {
  if (weights.narrow() && rows <= kNarrowPairRows) return true;
  return rows <= kPairRows && !weights.slim() && pairs >= kPairsPerThread * threads;
}

// `width`: panels of a unit of a stream.
LinearPlan plan_linear(long rows, long n, const Weights& weights, long width, int threads,
                       long unit_panels) {
  const long panels = pieces(n, kLanes);
  if (in_stream(rows, weights)) {
    return {panels, width, rows, 1, pieces(panels, width), 1};
  }
  const long row_blocks = pieces(rows, kUnitRows);
  const long unit_rows = pieces(pieces(rows, row_blocks), kTileRows) * kTileRows;
  while (unit_panels > kTilePanels && pieces(panels, unit_panels) * row_blocks < 4 * threads) {
    unit_panels = unit_panels / 2 > kTilePanels ? unit_panels / 2 : kTilePanels;
  }
  const long units = pieces(panels, unit_panels) * row_blocks;
  return {panels, unit_panels, unit_rows, row_blocks, units, 1};
}

LinearPlan plan_linear(long rows, long n, const Weights& weights, int threads) {
  const bool pairs = in_pairs(rows, pieces(n, kLanes) / 2, weights, threads);
  return plan_linear(rows, n, weights, pairs ? 2 : 1, threads, kUnitPanels);
}

// The floats that a unit carries from block to block; each thread has as many.
constexpr long kCarryFloats = kUnitRows * kUnitPanels * kLanes;

// Applies the scale and the bias to a panel's sum, of which the first `width` columns count.
inline V settle(const LinearCall& call, long panel, V sum, int width) {
  if (call.weights.scaled()) sum = mul(sum, call.weights.scales(panel));
  if (call.bias) sum = add(sum, load_some(call.bias + panel * kLanes, width));
  return sum;
}

// Finishes sums, [R][P][16], and writes them to `out`.
template <int R, int P>
void finish_tile(const LinearCall& call, long row, long panel, const float* sums) {
  for (int p = 0; p < P; ++p) {
    const long column = (panel + p) * kLanes;
    const int width = call.n - column < kLanes ? static_cast<int>(call.n - column) : kLanes;
    for (int r = 0; r < R; ++r) {
      V value = settle(call, panel + p, load(sums + (r * P + p) * kLanes), width);
      float* to = call.out + (row + r) * call.out_stride + column;
      if (call.add) value = add(load_some(to, width), value);
      store_some(to, value, width);
    }
  }
}

}  // namespace
