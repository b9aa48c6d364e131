// A product out = x * weight^T + bias, how it is cut into units of work, and what becomes of its
// sums (linear.h).
#pragma once

#include "pairs.h"

namespace {

// Of few rows a weight is read once, by up to kStreamRows; of wide weights, whose blocks need no
// decoding, by up to kWideStreamRows, since tiles leave memory more time. Two panels side by side
// share what is read of the rows, and memory has two streams and twice as many chains of
// multiply-adds to wait for: of kNarrowPairRows of narrow weights, which one chain would hold up,
// and of as many rows as there are registers for where threads have enough pairs.
//
// Values of K in a block. Of few rows a block is to stay in the nearest cache between its tiles. A
// long one puts its sums aside seldom, and what comes from the next cache is in time where tiles
// are as large as registers allow; the rows of a unit are to stay there, if it has 512 KiB.
#if PM_LEVEL >= 2
constexpr int kStreamRows = 16, kPairRows = 14, kNarrowPairRows = 4, kTileRows = 8, kTilePanels = 3;
constexpr long kBlockDepth = 640, kUnitRowsLeast = 256;
constexpr int kWideStreamRows = kPairRows;
constexpr int kSlimStreamRows = kStreamRows;  // of slim weights, which need registers themselves
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
constexpr long kShortDepth = 192, kShortRows = 64;  // of a block, and up to so many rows
constexpr long kUnitRows = (kUnitRowsLeast + kTileRows - 1) / kTileRows * kTileRows;  // whole tiles
constexpr long kUnitPanels = 12;
constexpr long kPairsPerThread = 8;
constexpr long kAheadLines = 64;  // of a stream that is read once; 16 rows take 8 cycles a line
// Below some 80 us of work (see parallel.h), in multiply-adds of a tile that is in cache; reading
// a weight costs as much as eight of them.
constexpr long kSerialWork = 1 << 23, kWeightWork = 8;

// What `x` of a call is.
enum class RowForm {
  kPlain,    // float32
  kRounded,  // float32 numbers that are bfloat16s
  kPaired,   // two bfloat16s a lane (pairs.h)
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
  bool add;   // to what `out` holds
  bool hold;  // sums stay in the carry, for somebody else to finish
  RowForm form = RowForm::kPlain;
};

// Calls body(M{}) with how the rows of a call meet weights, see pairs.h.
template <typename Body>
inline auto with_rows_of(const LinearCall& call, Body body) {
#if PM_LEVEL >= 3
  if (call.form == RowForm::kPaired) return body(BfloatPairs{});
#endif
  (void)call;
  return body(Floats{});
}

// How a product is cut into units of work.
struct LinearPlan {
  long panels;
  long unit_panels, unit_rows;
  long row_blocks;  // units of the same panels
  long units;
  long apart;  // from panel to panel of what a unit reads at once
};

inline long pieces(long whole, long part) { return (whole + part - 1) / part; }

// Whether so few rows read `weights` once.
inline bool in_stream(long rows, const Weights& weights) {
  if (!weights.narrow()) return rows <= kWideStreamRows;
  return rows <= (weights.slim() ? kSlimStreamRows : kStreamRows);
}

// Whether a stream of so many pairs of panels reads them as pairs. Of few pairs one more for one
// thread than for another would cost more than that brings.
inline bool in_pairs(long rows, long pairs, const Weights& weights, int threads) {
  if (weights.narrow() && rows <= kNarrowPairRows) return true;
  return rows <= kPairRows && !weights.slim() && pairs >= kPairsPerThread * threads;
}

// `width`: panels of a unit that is read once.
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

// What one unit carries from block to block, per thread.
constexpr long kCarryFloats = kUnitRows * kUnitPanels * kLanes;

// What a panel's sum, or the first `width` columns of it, comes to.
inline V settle(const LinearCall& call, long panel, V sum, int width) {
  if (call.weights.scaled()) sum = mul(sum, call.weights.scales(panel));
  if (call.bias) sum = add(sum, load_some(call.bias + panel * kLanes, width));
  return sum;
}

// Finished sums, [R][P][16], to where they belong.
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
