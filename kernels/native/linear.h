// out = x * weight^T + bias over panels of 16 columns stored as [K][16]. Every output element is
// one chain of multiply-adds over K in ascending order, whatever the tile it was computed in: a
// row's result does not depend on the other rows, on the tiling or on the threads.
//
// For few rows the weight is read once, at memory speed: one panel or two at a time for all rows
// (linear_stream.h). For more rows it is read in blocks that stay in cache, kBlockDepth values of K
// deep and up to kTilePanels panels wide, for all rows of a unit (linear_block.h). A sum that is
// carried from one block to the next is the same chain. Codes are decoded to floats, or pairs
// (pairs.h), in registers where they are read once, and once per block elsewhere.
#pragma once

#include "linear_block.h"
#include "linear_stream.h"

namespace {

inline Next next_unit(const LinearPlan& plan, const Weights& weights, long unit) {
  Next next = next_at(weights, unit / plan.row_blocks * plan.unit_panels);
  next.apart_bytes *= plan.apart;
  return next;
}

// Calls body(unit, what this thread reads next) for one thread's share of a product's units. Each
// of `team` threads begins with the unit of its own index, so that the operation before can
// prefetch it; the other units are claimed from `work`. `after` is what the thread reads after its
// share.
template <typename Body>
void share_units(const LinearCall& call, const LinearPlan& plan, pm::Counter& work, int thread,
                 int team, Next after, Body body) {
  long unit = thread, next = 0, end = 0;
  // Units are claimed one ahead, so that the next one can be prefetched meanwhile.
  for (bool more = unit < plan.units; more; unit = next) {
    more = work.take(plan.units - team, 1, &next, &end);
    next += team;
    body(unit, more ? next_unit(plan, call.weights, next) : after);
  }
}

// One thread's share of a product. `carry`: kCarryFloats floats of this thread's own.
void linear_share(const LinearCall& call, const LinearPlan& plan, pm::Counter& work, int thread,
                  int team, float* carry, Next after) {
  const Stream stream = stream_of(call);
  share_units(call, plan, work, thread, team, after, [&](long unit, Next ahead) {
    if (!in_stream(call.rows, call.weights)) {
      return block_unit(call, Unit(plan, call.rows, unit), carry, ahead);
    }
    const long panel = unit * plan.unit_panels;
    const bool pair = plan.unit_panels == 2 && panel + 1 < plan.panels;
    (pair ? stream.pair : stream.panel)(call, panel, 1, carry, ahead);
  });
}

}  // namespace
