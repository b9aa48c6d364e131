// out = silu(x * gate^T + bias) * (x * up^T + bias), where gate and up are the halves of one packed
// weight. The sums of both halves stay in cache until they are combined, so that the product, twice
// as wide as the result, is never written to memory. Each element has the bits that linear and
// silu_mul give.
#pragma once

#include "linear.h"
#include "rows.h"

namespace {

// Whether each half consists of whole panels; `n` is the width of the joined weight.
inline bool can_gate(long n) { return n % (2 * kLanes) == 0; }

// A weight that cannot be gated gets the plan of any other.
inline LinearPlan plan_gated(long rows, long n, const Weights& weights, int threads) {
  if (!can_gate(n)) return plan_linear(rows, n, weights, threads);
  // A pair is one panel from each half.
  LinearPlan plan = plan_linear(rows, n / 2, weights, 1, threads, kUnitPanels / 2);
  if (in_pairs(rows, plan.panels, weights, threads)) plan.apart = plan.panels;
  return plan;
}

// Combines held sums, [row][panel][16] for each half, into `height` rows from `row` on and `count`
// panels from `panel` on of `out`.
void gate_tile(const LinearCall& call, long row, long height, long panel, long count,
               const float* gates, const float* ups) {
  const long half = call.n / 2 / kLanes;
  for (long r = 0; r < height; ++r) {
    for (long p = 0; p < count; ++p) {
      const long at = (r * count + p) * kLanes;
      const V gate = settle(call, panel + p, load(gates + at), kLanes);
      const V up = settle(call, half + panel + p, load(ups + at), kLanes);
      store(call.out + (row + r) * call.out_stride + (panel + p) * kLanes, gated_by(gate, up));
    }
  }
}

// Combines the sums that block_panels left for a unit, tile by tile.
void gate_unit(const LinearCall& call, const Unit& unit, const float* gates, const float* ups) {
  for (long panel = unit.first; panel < unit.last;) {
    const long width = unit.last - panel >= kTilePanels ? kTilePanels : 1;
    const long tiles = pieces(unit.row_end - unit.row, kTileRows);
    long row = unit.row, at = (panel - unit.first) * unit.panel_carry;
    for (long tile = 0; tile < tiles; ++tile) {
      const long height = pieces(unit.row_end - row, tiles - tile);
      gate_tile(call, row, height, panel, width, gates + at, ups + at);
      row += height;
      at += kTileRows * width * kLanes;
    }
    panel += width;
  }
}

void gated_unit(const LinearCall& call, const Unit& unit, long apart, float* carry, Next after) {
  float* ups = carry + (unit.last - unit.first) * unit.panel_carry;
  const long depth = block_depth(call);
  for (long begin = 0; begin < call.k; begin += depth) {
    const long end = begin + depth < call.k ? begin + depth : call.k;
    const Next up = next_at(call.weights, apart + unit.first, begin);
    const Next next = end < call.k ? next_at(call.weights, unit.first, end) : after;
    block_span(call, unit, 0, begin, end, carry, up);
    block_span(call, unit, apart, begin, end, ups, next);
  }
  gate_unit(call, unit, carry, ups);
}

// One thread's share; like linear_share, for a call whose sums are held and whose `out` is
// [rows][n / 2].
void gated_share(const LinearCall& call, const LinearPlan& plan, pm::Counter& work, int thread,
                 int team, float* carry, Next after) {
  const Stream stream = stream_of(call);
  const long apart = plan.panels;
  share_units(call, plan, work, thread, team, after, [&](long unit, Next ahead) {
    if (!in_stream(call.rows, call.weights)) {
      return gated_unit(call, Unit(plan, call.rows, unit), apart, carry, ahead);
    }
    float* ups = carry + kStreamRows * kLanes;
    if (plan.apart > 1) {
      stream.pair(call, unit, apart, carry, ahead);
    } else {
      stream.panel(call, unit, 1, carry, next_at(call.weights, apart + unit));
      stream.panel(call, apart + unit, 1, ups, ahead);
    }
    gate_tile(call, 0, call.rows, unit, 1, carry, ups);
  });
}

}  // namespace
