// Products of many rows, which read the weight in blocks that stay in cache.
#pragma once

#include "linear_call.h"
#include "slim_weights.h"

namespace {

// Panels over a block of K, in the form in which they are multiplied: the first at `at`, the others
// `stride` lanes apart.
struct Panels {
  const float* at;
  long stride;
};

// Decodes values [begin, end) of K, whole groups, of a slim panel, as M multiplies them.
template <typename M>
void put_slim(const Weights& weights, long panel, long begin, long end, float* to) {
  SlimPanel<M> slim(weights, panel, begin);
  constexpr int kVectors = SlimPanel<M>::kVectors;
  V values[kVectors];
  const auto put = [&] {
    for (int i = 0; i < kVectors; ++i, to += kLanes) store(to, values[i]);
  };
  for (long k = begin; k < end; k += pm::kSlimDepth) {
    slim.template take<0>(values);
    put();
    slim.template take<1>(values);
    put();
  }
}

// P panels from `panel` on, over values [begin, end) of K: float32 panels where they are, others
// decoded to `room`, [P][kBlockDepth][16].
template <typename M, int P>
Panels panels_of(const LinearCall& call, long panel, long begin, long end, float* room) {
  const Weights& weights = call.weights;
  const char* first = weights.panel(panel) + begin * weights.row_bytes;
  if (!weights.narrow()) return {reinterpret_cast<const float*>(first), call.k * kLanes};
  if (weights.slim()) {
    for (long p = 0; p < P; ++p) {
      put_slim<M>(weights, panel + p, begin, end, room + p * kBlockDepth * kLanes);
    }
    return {room, kBlockDepth * kLanes};
  }
  M::with_type(weights.type, [&](auto type) {
    using T = decltype(type);
    const long whole = (end - begin) / M::kStep * M::kStep;
    for (long p = 0; p < P; ++p) {
      const char* panel_codes = first + p * weights.panel_bytes;
      const auto* codes = reinterpret_cast<const typename T::Code*>(panel_codes);
      float* to = room + p * kBlockDepth * kLanes;
      for (long i = 0; i < whole; i += M::kStep, to += kLanes) {
        store(to, M::template weights<T, M::kStep>(codes + i * kLanes));
      }
      if (begin + whole < end) store(to, M::template weights<T, 1>(codes + whole * kLanes));
    }
  });
  return {room, kBlockDepth * kLanes};
}

// Up to this many tiles prefetch what comes next evenly over their steps, which with few rows and
// float32 weights is quicker than all at once.
constexpr long kEvenTiles = 6;

// What a tile prefetches while it computes: `steps` steps of `panels` panels.
struct FetchAhead {
  Next next;
  long steps, panels;
};

alignas(kLineBytes) constexpr float kNoSums[kTileRows * kTilePanels * kLanes] = {};

// Multiplies R rows by P panels over one block: values [begin, end) of K, with the weights
// `panels`. Sums go to `carry`, [R][P][16], from which the next block continues. Prefetches evenly
// over all steps (EVENLY, one panel only), or in the first steps.
template <typename M, int R, int P, bool EVENLY>
void block_tile(const LinearCall& call, long row, long panel, long begin, long end, Panels panels,
                float* carry, FetchAhead fetch) {
  const float* x = call.x + row * call.x_stride + begin / M::kStep;
  const float* from = begin ? carry : kNoSums;
  V sum[R][P];
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) sum[r][p] = load(from + (r * P + p) * kLanes);
  }
  const auto multiply = [&](long i) {
    V w[P];
    for (int p = 0; p < P; ++p) w[p] = load(panels.at + p * panels.stride + i * kLanes);
    for (int r = 0; r < R; ++r) {
      V value = splat(x[r * call.x_stride + i]);
      for (int p = 0; p < P; ++p) sum[r][p] = M::add_product(value, w[p], sum[r][p]);
    }
  };
  const Next next = fetch.next;
  const long steps = pieces(end - begin, M::kStep), apart = M::kStep * next.row_bytes;
  const long ahead = fetch.steps;
  long i = 0;
  if constexpr (EVENLY) {
    const long each = pieces(4 * ahead, steps);  // lines per four steps
    long left = ahead;
    for (const char* at = next.at; left > 0 && i + 4 <= steps; i += 4, left -= each) {
      for (long line = 0; line < each; ++line, at += apart) prefetch_far(at);
#pragma GCC unroll 4
      for (long step = i; step < i + 4; ++step) multiply(step);
    }
  } else if (fetch.panels > 1) {
#pragma GCC unroll 4
    for (; i < ahead; ++i) {
      for (long p = 0; p < fetch.panels; ++p) {
        prefetch_far(next.at + p * next.apart_bytes + i * apart);
      }
      multiply(i);
    }
  } else {
#pragma GCC unroll 4
    for (; i < ahead; ++i) {
      prefetch_far(next.at + i * apart);
      multiply(i);
    }
  }
#pragma GCC unroll 4
  for (; i < steps; ++i) multiply(i);
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) store(carry + (r * P + p) * kLanes, sum[r][p]);
  }
  if (end == call.k && !call.hold) finish_tile<R, P>(call, row, panel, carry);
}

using BlockTile = void (*)(const LinearCall&, long, long, long, long, Panels, float*, FetchAhead);

template <typename M, int P, bool EVENLY>
BlockTile block_tile_of(long rows) {
  switch (rows) {
    case 1: return block_tile<M, 1, P, EVENLY>;
#if PM_LEVEL > 0
    case 2: return block_tile<M, 2, P, EVENLY>;
    case 3: return block_tile<M, 3, P, EVENLY>;
    case 4: return block_tile<M, 4, P, EVENLY>;
    case 5: return block_tile<M, 5, P, EVENLY>;
#endif
#if PM_LEVEL >= 2
    case 6: return block_tile<M, 6, P, EVENLY>;
    case 7: return block_tile<M, 7, P, EVENLY>;
#endif
    default: return block_tile<M, kTileRows, P, EVENLY>;
  }
}

// Multiplies rows [row, row_end) by panels [panel, panel + P) over one block of K, in tiles of even
// height. Of what comes next, each of the first P tiles prefetches a panel, or several panels if
// there are fewer tiles; if P is 1, each tile prefetches its share of the panel.
template <typename M, int P>
void block_panels(const LinearCall& call, long row, long row_end, long panel, long begin,
                  long end, float* carry, Next next) {
  alignas(kLineBytes) float room[P * kBlockDepth * kLanes];
  const Panels panels = panels_of<M, P>(call, panel, begin, end, room);
  const long tiles = pieces(row_end - row, kTileRows), steps = pieces(end - begin, M::kStep);
  const bool evenly = P == 1 && tiles <= kEvenTiles && !call.weights.narrow();
  for (long tile = 0, fetched = 0; tile < tiles; ++tile) {
    const long height = pieces(row_end - row, tiles - tile);
    FetchAhead fetch{next, 0, 1};
    if (next.at && P == 1) {
      fetch.steps = steps * (tile + 1) / tiles - steps * tile / tiles;
      next.at += fetch.steps * M::kStep * next.row_bytes;
    } else if (next.at && fetched < P) {
      fetch = {next, steps, pieces(P - fetched, tiles - tile)};
      fetched += fetch.panels;
      next.at += fetch.panels * next.apart_bytes;
    }
    const BlockTile multiply = evenly ? block_tile_of<M, P, P == 1>(height)
                                      : block_tile_of<M, P, false>(height);
    multiply(call, row, panel, begin, end, panels, carry, fetch);
    row += height;
    carry += kTileRows * P * kLanes;
  }
}

// The rows and panels of a unit, and how many floats one of its panels carries to the next block.
struct Unit {
  long row, row_end, first, last;
  long panel_carry;

  Unit(const LinearPlan& plan, long rows, long unit)
      : row(unit % plan.row_blocks * plan.unit_rows),
        first(unit / plan.row_blocks * plan.unit_panels) {
    row_end = row + plan.unit_rows < rows ? row + plan.unit_rows : rows;
    last = first + plan.unit_panels < plan.panels ? first + plan.unit_panels : plan.panels;
    panel_carry = pieces(row_end - row, kTileRows) * kTileRows * kLanes;
  }
};

// Multiplies the panels of a unit, or those `apart` panels further on, over one block of K; `after`
// is what is read next.
void block_span(const LinearCall& call, const Unit& unit, long apart, long begin, long end,
                float* carry, Next after) {
  for (long panel = unit.first; panel < unit.last;) {
    const long width = unit.last - panel >= kTilePanels ? kTilePanels : 1;
    const bool last = panel + width == unit.last;
    const Next next = last ? after : next_at(call.weights, apart + panel + width, begin);
    float* sums = carry + (panel - unit.first) * unit.panel_carry;
    with_rows_of(call, [&](auto rows) {
      using M = decltype(rows);
      if (width == 1) {
        block_panels<M, 1>(call, unit.row, unit.row_end, apart + panel, begin, end, sums, next);
      } else {
        block_panels<M, kTilePanels>(call, unit.row, unit.row_end, apart + panel, begin, end,
                                     sums, next);
      }
    });
    panel += width;
  }
}

// Values of K in each block of a product; about the same in all blocks.
inline long block_depth(const LinearCall& call) {
  const long most = call.rows <= kShortRows ? kShortDepth : kBlockDepth;
  return pieces(pieces(call.k, pieces(call.k, most)), 8) * 8;
}

void block_unit(const LinearCall& call, const Unit& unit, float* carry, Next after) {
  const long depth = block_depth(call);
  for (long begin = 0; begin < call.k; begin += depth) {
    const long end = begin + depth < call.k ? begin + depth : call.k;
    const Next next = end < call.k ? next_at(call.weights, unit.first, end) : after;
    block_span(call, unit, 0, begin, end, carry, next);
  }
}

}  // namespace
