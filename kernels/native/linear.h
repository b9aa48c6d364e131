// out = x * weight^T + bias over panels of 16 columns stored as [K][16]. Every output element is
// one chain of multiply-adds over K in ascending order, whatever the tile it was computed in: a
// row's result does not depend on the other rows, on the tiling or on the threads.
//
// Few rows read the weight once, at memory speed: one panel at a time for all of them. More rows
// go through it in blocks that stay in cache: of `kBlockDepth` values of K, three panels wide,
// for all rows of a unit. A sum that is carried from one block to the next is the same chain.
// Codes become floats in registers where they are read once, and once a block elsewhere. Of very
// few rows and narrow weights, two panels at a time: memory would wait for one chain of
// multiply-adds.
#pragma once

#include "weights.h"

namespace {

// Values of K in a block. Of few rows a block is to stay in the nearest cache between its tiles. A
// long one puts its sums aside seldom, and what comes from the next cache is in time where tiles
// are as large as registers allow.
#if PM_LEVEL >= 2
constexpr int kStreamRows = 16, kPairRows = 4, kTileRows = 8, kTilePanels = 3;
constexpr long kBlockDepth = 640;
#elif PM_LEVEL == 1
constexpr int kStreamRows = 6, kPairRows = 2, kTileRows = 6, kTilePanels = 1;
constexpr long kBlockDepth = 192;
#else
constexpr int kStreamRows = 2, kPairRows = 1, kTileRows = 2, kTilePanels = 1;
constexpr long kBlockDepth = 192;
#endif
constexpr long kShortDepth = 192, kShortRows = 64;  // of a block, and up to so many rows
constexpr long kUnitRows = (256 + kTileRows - 1) / kTileRows * kTileRows;  // whole tiles
constexpr long kUnitPanels = 12;
constexpr long kAheadLines = 64;  // of a stream that is read once; 16 rows take 8 cycles a line
// Below some 80 us of work (see parallel.h), in multiply-adds of a tile that is in cache; reading
// a weight costs as much as eight of them.
constexpr long kSerialWork = 1 << 23, kWeightWork = 8;

struct LinearCall {
  const float* x;
  long x_stride;
  Weights weights;
  const float* bias;  // or null
  float* out;
  long out_stride;
  long rows, n, k;
  bool add;   // to what `out` holds
  bool hold;  // sums stay in the carry, for somebody else to finish
};

// How a product is cut into units of work.
struct LinearPlan {
  long panels;
  long unit_panels, unit_rows;
  long row_blocks;  // units of the same panels
  long units;
  long apart;  // from panel to panel of what a unit reads at once
};

inline long pieces(long whole, long part) { return (whole + part - 1) / part; }

inline bool in_pairs(long rows, bool narrow) { return narrow && rows <= kPairRows; }

LinearPlan plan_linear(long rows, long n, bool narrow, int threads,
                       long unit_panels = kUnitPanels) {
  const long panels = pieces(n, kLanes);
  if (rows <= kStreamRows) {
    const long width = in_pairs(rows, narrow) ? 2 : 1;
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

// P panels from `panel` on, `apart` panels apart, for R rows, all of K. Fetches ahead in them, and at
// their end in the next ones. Sums go to `carry`, [P][kStreamRows][16].
template <typename T, int R, int P>
void stream_panels(const LinearCall& call, long panel, long apart, float* carry, Next next) {
  constexpr long kRowBytes = kLanes * static_cast<long>(sizeof(typename T::Code));
  constexpr long kAhead = kAheadLines * (kLineBytes / kRowBytes);  // in values of K
  const char* weight = call.weights.panel(panel);
  long apart_bytes = apart * call.weights.panel_bytes;
  V sum[R][P];
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) sum[r][p] = zero();
  }
  auto multiply = [&, apart_bytes](long k) {
    V w[P];
    for (int p = 0; p < P; ++p) {
      const char* at = weight + p * apart_bytes + k * kRowBytes;
      w[p] = T::decode(reinterpret_cast<const typename T::Code*>(at));
    }
    for (int r = 0; r < R; ++r) {
      const V value = splat(call.x[r * call.x_stride + k]);
      for (int p = 0; p < P; ++p) sum[r][p] = fma(value, w[p], sum[r][p]);
    }
  };
  const long own = call.k > kAhead ? call.k - kAhead : 0;
  const char* ahead = weight + (call.k - own) * kRowBytes;
  long k = 0;
  for (long end = own; k < call.k; end = call.k) {
    for (; k + 4 <= end; k += 4, ahead += 4 * kRowBytes) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        if (i * kRowBytes % kLineBytes == 0) {
          for (int p = 0; p < P; ++p) prefetch(ahead + p * apart_bytes + i * kRowBytes);
        }
        multiply(k + i);
      }
    }
    for (; k < end; ++k) multiply(k);
    ahead = next.at ? next.at : weight;
    apart_bytes = next.at ? next.apart_bytes : apart_bytes;
  }
  for (int p = 0; p < P; ++p) {
    float* sums = carry + p * kStreamRows * kLanes;
    for (int r = 0; r < R; ++r) store(sums + r * kLanes, sum[r][p]);
    if (!call.hold) finish_tile<R, 1>(call, 0, panel + p, sums);
  }
}

// Panels as floats over a block of K: the first at `at`, the others `stride` floats apart.
struct Floats {
  const float* at;
  long stride;
};

// Of P panels from `panel` on, over values [begin, end) of K: where they are, or in `room`,
// [P][kBlockDepth][16].
template <int P>
Floats floats_of(const LinearCall& call, long panel, long begin, long end, float* room) {
  const Weights& weights = call.weights;
  const char* first = weights.panel(panel) + begin * weights.row_bytes;
  if (!weights.narrow()) return {reinterpret_cast<const float*>(first), call.k * kLanes};
  with_weight_type(weights.type, [&](auto type) {
    using T = decltype(type);
    for (long p = 0; p < P; ++p) {
      const char* codes = first + p * weights.panel_bytes;
      float* to = room + p * kBlockDepth * kLanes;
      for (long i = 0; i < (end - begin) * kLanes; i += kLanes) {
        store(to + i, T::decode(reinterpret_cast<const typename T::Code*>(codes) + i));
      }
    }
  });
  return {room, kBlockDepth * kLanes};
}

alignas(kLineBytes) constexpr float kNoSums[kTileRows * kTilePanels * kLanes] = {};

// A tile's share of a block: values [begin, end) of K, whose weights are `floats`. Sums go to
// `carry`, [R][P][16], from which those of a later block go on. Fetches `ahead` rows of `next`.
template <int R, int P>
void block_tile(const LinearCall& call, long row, long panel, long begin, long end, Floats floats,
                float* carry, Next next, long ahead) {
  const float* x = call.x + row * call.x_stride + begin;
  const float* from = begin ? carry : kNoSums;
  V sum[R][P];
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) sum[r][p] = load(from + (r * P + p) * kLanes);
  }
  const auto multiply = [&](long k) {
    V w[P];
    for (int p = 0; p < P; ++p) w[p] = load(floats.at + p * floats.stride + k * kLanes);
    for (int r = 0; r < R; ++r) {
      V value = splat(x[r * call.x_stride + k]);
      for (int p = 0; p < P; ++p) sum[r][p] = fma(value, w[p], sum[r][p]);
    }
  };
#pragma GCC unroll 4
  for (long k = 0; k < ahead; ++k) {
    prefetch_far(next.at + k * next.row_bytes);
    multiply(k);
  }
#pragma GCC unroll 4
  for (long k = ahead; k < end - begin; ++k) multiply(k);
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) store(carry + (r * P + p) * kLanes, sum[r][p]);
  }
  if (end == call.k && !call.hold) finish_tile<R, P>(call, row, panel, carry);
}

using StreamPanels = void (*)(const LinearCall&, long, long, float*, Next);
using BlockTile = void (*)(const LinearCall&, long, long, long, long, Floats, float*, Next, long);

template <typename T>
StreamPanels stream_panel_of(long rows) {
  switch (rows) {
    case 1: return stream_panels<T, 1, 1>;
#if PM_LEVEL > 0
    case 2: return stream_panels<T, 2, 1>;
    case 3: return stream_panels<T, 3, 1>;
    case 4: return stream_panels<T, 4, 1>;
    case 5: return stream_panels<T, 5, 1>;
#endif
#if PM_LEVEL >= 2
    case 6: return stream_panels<T, 6, 1>;
    case 7: return stream_panels<T, 7, 1>;
    case 8: return stream_panels<T, 8, 1>;
    case 9: return stream_panels<T, 9, 1>;
    case 10: return stream_panels<T, 10, 1>;
    case 11: return stream_panels<T, 11, 1>;
    case 12: return stream_panels<T, 12, 1>;
    case 13: return stream_panels<T, 13, 1>;
    case 14: return stream_panels<T, 14, 1>;
    case 15: return stream_panels<T, 15, 1>;
#endif
    default: return stream_panels<T, kStreamRows, 1>;
  }
}

template <typename T>
StreamPanels stream_pair_of(long rows) {
  switch (rows) {
    case 1: return stream_panels<T, 1, 2>;
#if PM_LEVEL > 0
    case 2: return stream_panels<T, 2, 2>;
#endif
#if PM_LEVEL >= 2
    case 3: return stream_panels<T, 3, 2>;
#endif
    default: return stream_panels<T, kPairRows, 2>;
  }
}

// What reads a panel of a call of few rows, and what reads two of a narrow weight.
struct Stream {
  StreamPanels panel, pair;
};

Stream stream_of(const LinearCall& call) {
  return with_weight_type(call.weights.type, [&](auto type) -> Stream {
    using T = decltype(type);
    StreamPanels pair = nullptr;
    if constexpr (sizeof(typename T::Code) < sizeof(float)) pair = stream_pair_of<T>(call.rows);
    return {stream_panel_of<T>(call.rows), pair};
  });
}

template <int P>
BlockTile block_tile_of(long rows) {
  switch (rows) {
    case 1: return block_tile<1, P>;
#if PM_LEVEL > 0
    case 2: return block_tile<2, P>;
    case 3: return block_tile<3, P>;
    case 4: return block_tile<4, P>;
    case 5: return block_tile<5, P>;
#endif
#if PM_LEVEL >= 2
    case 6: return block_tile<6, P>;
    case 7: return block_tile<7, P>;
#endif
    default: return block_tile<kTileRows, P>;
  }
}

// Panels [panel, panel + P) for rows [row, row_end), in tiles of even height, over one block of
// K. The first P tiles fetch a panel each of what comes next; where a panel is all, each tile
// fetches its share.
template <int P>
void block_panels(const LinearCall& call, long row, long row_end, long panel, long begin,
                  long end, float* carry, Next next) {
  alignas(kLineBytes) float room[P * kBlockDepth * kLanes];
  const Floats floats = floats_of<P>(call, panel, begin, end, room);
  const long tiles = pieces(row_end - row, kTileRows);
  for (long tile = 0; tile < tiles; ++tile) {
    const long height = pieces(row_end - row, tiles - tile);
    const long depth = end - begin;
    const long ahead = !next.at ? 0
                       : P == 1 ? depth * (tile + 1) / tiles - depth * tile / tiles
                       : tile < P ? depth : 0;
    block_tile_of<P>(height)(call, row, panel, begin, end, floats, carry, next, ahead);
    if (ahead) next.at += P == 1 ? ahead * next.row_bytes : next.apart_bytes;
    row += height;
    carry += kTileRows * P * kLanes;
  }
}

// The rows and panels of a unit, and what one panel of them carries.
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

// Panels of a unit, `apart` panels further on, over one block of K; `after` comes after them.
void block_span(const LinearCall& call, const Unit& unit, long apart, long begin, long end,
                float* carry, Next after) {
  for (long panel = unit.first; panel < unit.last;) {
    const long width = unit.last - panel >= kTilePanels ? kTilePanels : 1;
    const bool last = panel + width == unit.last;
    const Next next = last ? after : next_at(call.weights, apart + panel + width, begin);
    float* sums = carry + (panel - unit.first) * unit.panel_carry;
    if (width == 1) {
      block_panels<1>(call, unit.row, unit.row_end, apart + panel, begin, end, sums, next);
    } else {
      block_panels<kTilePanels>(call, unit.row, unit.row_end, apart + panel, begin, end, sums,
                                next);
    }
    panel += width;
  }
}

// Values of K in each block of a product, about as many in all of them.
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

inline Next next_unit(const LinearPlan& plan, const Weights& weights, long unit) {
  Next next = next_at(weights, unit / plan.row_blocks * plan.unit_panels);
  next.apart_bytes *= plan.apart;
  return next;
}

// One thread's share of a product's units, as body(unit, what this thread reads next). Of a team
// of `team` threads each begins with the unit of its own number, so that what comes before can
// fetch it; the others are taken from `work`. `after` is what it reads when it is done.
template <typename Body>
void share_units(const LinearCall& call, const LinearPlan& plan, pm::Counter& work, int thread,
                 int team, Next after, Body body) {
  long unit = thread, next = 0, end = 0;
  // Claimed one ahead, so that what comes next can be fetched meanwhile.
  for (bool more = unit < plan.units; more; unit = next) {
    more = work.take(plan.units - team, 1, &next, &end);
    next += team;
    body(unit, more ? next_unit(plan, call.weights, next) : after);
  }
}

// `carry`: kCarryFloats of this thread's own.
void linear_share(const LinearCall& call, const LinearPlan& plan, pm::Counter& work, int thread,
                  int team, float* carry, Next after) {
  const Stream stream = stream_of(call);
  share_units(call, plan, work, thread, team, after, [&](long unit, Next ahead) {
    if (call.rows > kStreamRows) return block_unit(call, Unit(plan, call.rows, unit), carry, ahead);
    const long panel = unit * plan.unit_panels;
    const bool pair = plan.unit_panels == 2 && panel + 1 < plan.panels;
    (pair ? stream.pair : stream.panel)(call, panel, 1, carry, ahead);
  });
}

}  // namespace
