// Products on matrix tiles (tiles.h), with panels of weights in pairs. For one or two tiles of rows
// a pair of panels is read from beginning to end, and its sums stay in tile registers. For more
// rows it is read in blocks of K, each of which is multiplied by all rows. Weights are split while
// those before them are multiplied. With a gate, a pair is one panel from each half (gated.h).
#pragma once

#include "gated.h"
#include "tiles.h"

namespace {

constexpr long kRegisterTiles = 2;  // tiles of rows whose sums stay in registers
constexpr long kManyDepth = 4;      // tiles of K in a block, for more rows

// The panels of a unit, in pairs. One that is left over at the end is computed twice.
struct Pairs {
  long first, last;  // panels of the unit
  long step, apart;  // from pair to pair, and within one

  Pairs(const LinearPlan& plan, const Unit& unit, bool gated)
      : first(unit.first), last(unit.last), step(gated ? 1 : 2), apart(gated ? plan.panels : 1) {}
  long count() const { return pieces(last - first, step); }
  long panel(long pair) const { return first + pair * step; }
  long second(long pair) const {
    return step == 2 && panel(pair) + 1 == last ? panel(pair) : panel(pair) + apart;
  }
};

LinearPlan plan_tiles(long rows, long panels, int threads, long unit_panels, long least) {
  const long tiles = pieces(rows, kTileHeight);
  const long row_blocks = pieces(tiles, kUnitRows / kTileHeight);
  const long unit_rows = pieces(tiles, row_blocks) * pieces(rows, tiles);
  if (tiles <= kRegisterTiles) unit_panels = least;
  while (unit_panels > least && pieces(panels, unit_panels) * row_blocks < 4 * threads) {
    unit_panels = pieces(unit_panels, 2 * least) * least;
  }
  const long units = pieces(panels, unit_panels) * row_blocks;
  return {panels, unit_panels, unit_rows, row_blocks, units, 1};
}

inline LinearPlan plan_tile_linear(long rows, long n, int threads) {
  return plan_tiles(rows, pieces(n, kLanes), threads, kUnitPanels, 2);
}

inline LinearPlan plan_tile_gated(long rows, long n, int threads) {
  LinearPlan plan = plan_tiles(rows, n / 2 / kLanes, threads, kUnitPanels / 2, 1);
  plan.apart = plan.panels;
  return plan;
}

// Splits a pair of panels over tiles [begin, end) of K, a little at a time, to
// [tile of K][panel][part][16][32]. Prefetches the corresponding place of `then`, which comes next.
template <typename T>
class Splitter {
 public:
  Splitter(const Weights& weights, const char* first, const char* second, long begin, long end,
           Word* to, Next then)
      : panels_{first, second}, row_bytes_(weights.row_bytes), row_(begin * kTileDepth),
        rows_left_(weights.k), to_(to), left_((end - begin) * 2 * kTilePairs),
        fetch_(then.at ? then.at - row_ * row_bytes_ : first),
        fetch_apart_(then.at ? then.apart_bytes : 0) {}

  long left() const { return left_; }

  // Splits at most `lines` more lines, a panel's tile at a time.
  void advance(long lines) {
    while (lines > 0 && left_ > 0) {
      const long rest = kTilePairs - at_, count = lines < rest ? lines : rest;
      if (row_ + kTileDepth <= rows_left_) {
        run<true>(count);
      } else {
        run<false>(count);
      }
      lines -= count;
      left_ -= count;
      at_ += count;
      if (at_ < kTilePairs) continue;
      at_ = 0;
      to_ += T::kParts * kTileWords;
      panel_ ^= 1;
      if (panel_ == 0) row_ += kTileDepth;
    }
  }

 private:
  const char* panels_[2];
  long row_bytes_;
  long row_;  // the first value of K of the current tile
  long rows_left_;
  Word* to_;
  long left_;
  const char* fetch_;
  long fetch_apart_;
  long at_ = 0, panel_ = 0;

  template <bool WHOLE>
  void run(long count) const {
    const char* from = panels_[panel_] + (row_ + at_) * row_bytes_;
    const char* ahead = fetch_ + panel_ * fetch_apart_ + (row_ + 2 * at_) * row_bytes_;
    Word* to = to_ + at_ * kTileDepth;
    for (long i = 0; i < count; ++i, to += kTileDepth) {
      const char* low = from + i * row_bytes_;
      const char* high = low + kTilePairs * row_bytes_;
      const long left = rows_left_ - row_ - at_ - i;
      T::line(WHOLE || left > 0 ? low : nullptr, WHOLE || left > kTilePairs ? high : nullptr, to);
      prefetch(ahead + 2 * i * row_bytes_);
      prefetch(ahead + (2 * i + 1) * row_bytes_);
    }
  }
};

// Finishes the sums of `height` rows of one panel, [row][16], and writes them to `out`.
void finish_sums(const LinearCall& call, long row, long height, long panel, const float* sums) {
  const long column = panel * kLanes;
  const int width = call.n - column < kLanes ? static_cast<int>(call.n - column) : kLanes;
  for (long r = 0; r < height; ++r) {
    V value = settle(call, panel, load(sums + r * kLanes), width);
    float* to = call.out + (row + r) * call.out_stride + column;
    if (call.add) value = add(load_some(to, width), value);
    store_some(to, value, width);
  }
}

// A unit: pairs of panels for some tiles of rows.
template <typename T, long ROW_PARTS>
class TileUnit {
 public:
  TileUnit(const LinearCall& call, const RowTiles& rows, const LinearPlan& plan, long unit,
           float* carry, Next after)
      : TileUnit(call, rows, plan, Unit(plan, call.rows, unit), carry, after) {}

  void run() {
    alignas(kLineBytes) Word split[2][kManyDepth * 2 * T::kParts * kTileWords];
    Turn turn{0, 0};
    {
      Splitter<T> first = splitter(turn, split[0]);
      first.advance(first.left());
    }
    for (int side = 0; turn.pair < pairs_.count(); side ^= 1) {
      finish_stores();
      const Turn next = after(turn);
      Splitter<T> splitting = splitter(next, split[side ^ 1]);
      multiply(turn, split[side], splitting);
      splitting.advance(splitting.left());
      turn = next;
    }
  }

 private:
  struct Turn {
    long pair, begin;  // tiles of K from `begin` on
  };

  const LinearCall& call_;
  const RowTiles& rows_;
  Pairs pairs_;
  long first_, last_;  // tiles of rows
  long block_;         // tiles of K a turn
  float* carry_;
  Next after_;

  TileUnit(const LinearCall& call, const RowTiles& rows, const LinearPlan& plan, Unit unit,
           float* carry, Next after)
      : call_(call), rows_(rows), pairs_(plan, unit, call.hold),
        first_(unit.row / rows.height), last_(pieces(unit.row_end, rows.height)),
        block_(in_registers() ? 1 : kManyDepth), carry_(carry), after_(after) {}

  bool in_registers() const { return last_ - first_ <= kRegisterTiles; }
  long panel_floats() const { return (last_ - first_) * kSumFloats; }
  long end(const Turn& turn) const {
    return turn.begin + block_ < rows_.deep ? turn.begin + block_ : rows_.deep;
  }

  Turn after(const Turn& turn) const {
    const Turn deeper{turn.pair, turn.begin + block_}, beside{turn.pair + 1, turn.begin};
    if (in_registers()) return deeper.begin < rows_.deep ? deeper : Turn{turn.pair + 1, 0};
    if (beside.pair < pairs_.count()) return beside;
    return deeper.begin < rows_.deep ? Turn{0, deeper.begin} : Turn{pairs_.count(), 0};
  }

  Splitter<T> splitter(const Turn& turn, Word* to) const {
    if (turn.pair >= pairs_.count()) return {call_.weights, nullptr, nullptr, 0, 0, to, after_};
    const Turn next = after(turn);
    Next then = after_;
    if (next.pair < pairs_.count()) {
      then = next_at(call_.weights, pairs_.panel(next.pair), next.begin * kTileDepth);
      then.apart_bytes *= pairs_.second(next.pair) - pairs_.panel(next.pair);
    }
    return {call_.weights, call_.weights.panel(pairs_.panel(turn.pair)),
            call_.weights.panel(pairs_.second(turn.pair)), turn.begin, end(turn), to, then};
  }

  void multiply(const Turn& turn, const Word* split, Splitter<T>& splitting) {
    float* carry = carry_ + (in_registers() ? 0 : turn.pair) * 2 * panel_floats();
    const long calls = pieces(last_ - first_, 2) * (end(turn) - turn.begin) *
                       kBetween<ROW_PARTS, T::kParts>;
    const long lines = pieces(splitting.left(), calls);
    for (long tile = first_; tile < last_; tile += 2) {
      float* sums = carry + (tile - first_) * kSumFloats;
      if (tile + 1 < last_) {
        add_tiles<2>(turn, tile, split, sums, splitting, lines);
      } else {
        add_tiles<1>(turn, tile, split, sums, splitting, lines);
      }
    }
    if (end(turn) == rows_.deep) finish(turn, carry);
  }

  template <int R>
  void add_tiles(const Turn& turn, long tile, const Word* split, float* sums,
                 Splitter<T>& splitting, long lines) {
    if (turn.begin == 0) {
      zero_sums<R>();
    } else if (!in_registers()) {
      load_sums<R>(sums, panel_floats());
    }
    for (long depth = turn.begin; depth < end(turn); ++depth) {
      add_tile<R, ROW_PARTS, T::kParts>(rows_.at(tile, depth), rows_.apart(), split,
                                        [&] { splitting.advance(lines); });
      split += 2 * T::kParts * kTileWords;
    }
    if (!in_registers() || end(turn) == rows_.deep) store_sums<R>(sums, panel_floats());
  }

  void finish(const Turn& turn, const float* sums) const {
    const long panel = pairs_.panel(turn.pair), second = pairs_.second(turn.pair);
    for (long tile = first_; tile < last_; ++tile, sums += kSumFloats) {
      const long row = tile * rows_.height, left = call_.rows - row;
      const long height = left < rows_.height ? left : rows_.height;
      if (call_.hold) {
        gate_tile(call_, row, height, panel, 1, sums, sums + panel_floats());
        continue;
      }
      finish_sums(call_, row, height, panel, sums);
      if (second != panel) finish_sums(call_, row, height, second, sums + panel_floats());
    }
  }
};

// One thread's share, like linear_share, for rows that are laid out in tiles. If the sums are held,
// it applies the gate.
void tile_share(const LinearCall& call, const RowTiles& rows, const LinearPlan& plan,
                pm::Counter& work, int thread, int team, float* carry, Next after) {
  const Tiles tiles(rows.height);
  share_units(call, plan, work, thread, team, after, [&](long unit, Next ahead) {
    if (rows.rounds) {
      with_bfloat_type(call.weights.type, [&](auto type) {
        using T = SplitWeights<decltype(type)>;
        TileUnit<T, row_parts(true)>(call, rows, plan, unit, carry, ahead).run();
      });
    } else {
      with_weight_type(call.weights.type, [&](auto type) {
        using T = SplitWeights<decltype(type)>;
        TileUnit<T, row_parts(false)>(call, rows, plan, unit, carry, ahead).run();
      });
    }
  });
}

}  // namespace
