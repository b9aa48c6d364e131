// Tiles: neighbouring rows that share each block of K and V while it is in cache. They belong to
// one sequence, or to several that begin with the same pages, a shared prefix.
#pragma once

#include <stdlib.h>

#include "attention_block.h"
#include "memory.h"

namespace {

struct Scratch {
  float* q;        // the unit's queries, [query][head_dim]
  float* span;     // their states within the current span
  float* merged;   // their states over the spans before it
  float* weights;  // [query][64]
  float* keep;     // [query]
  void* keys;      // [head_dim][64] codes, if pages do not consist of whole vectors
  Run* runs;       // of the current block
};

// `shared`: how many positions, in whole blocks from 0 on, all rows of the tile read from the same
// pages; later ones each row reads from its own pages. INT_MAX: the rows are of one sequence.
struct Tile {
  int row, rows, shared;
};

// Rows [first, end) of a tile.
struct Rows {
  int first, end;
};

// Positions [low, limit) to which a row or tile attends.
struct Reach {
  long low, limit;
};

inline Reach reach_of(const AttentionCall& call, long row) {
  const long limit = call.row_position[row] + 1;
  return {limit > call.window ? limit - call.window : 0, limit};
}

inline Reach reach_of(const AttentionCall& call, Tile tile) {
  Reach reach = reach_of(call, tile.row);
  for (int i = 1; i < tile.rows; ++i) {
    const Reach own = reach_of(call, tile.row + i);
    reach.low = own.low < reach.low ? own.low : reach.low;
    reach.limit = own.limit > reach.limit ? own.limit : reach.limit;
  }
  return reach;
}

// Spans [first, end).
struct Spans {
  long first, end;

  explicit Spans(Reach reach) : first(reach.low / kSpan), end((reach.limit - 1) / kSpan + 1) {}
  bool has(long span) const { return first <= span && span < end; }
  long count() const { return end - first; }
};

// The slots of the block at `start` that are within reach; none if end <= first.
inline Slots slots_of(Reach reach, long start) {
  const long low = reach.low - start, limit = reach.limit - start;
  return {static_cast<int>(low < 0 ? 0 : low < kBlock ? low : kBlock),
          static_cast<int>(limit < kBlock ? limit : kBlock)};
}

void pack_queries(const AttentionCall& call, Tile tile, long kv_head, Scratch& scratch) {
  const long floats = call.group * call.pages.head_dim;
  for (int i = 0; i < tile.rows; ++i) {
    memcpy(scratch.q + i * floats, call.q + (tile.row + i) * call.q_stride + kv_head * floats,
           sizeof(float) * static_cast<size_t>(floats));
  }
}

// A run of `count` queries of a tile, from `query` on, over the block at `start`; all of them
// attend to it from the same slot on.
Run run_at(const AttentionCall& call, Tile tile, long start, long query, int count,
           const Scratch& scratch) {
  Run run{scratch.q + query * call.pages.head_dim,
          scratch.span + query * state_floats(call.width),
          scratch.weights + query * kBlock,
          scratch.keep + query,
          count,
          {kBlock, 0},
          kBlock,
          {},
          Fetch::kNothing};
  for (int i = 0; i < count; ++i) {
    const Slots seen = slots_of(reach_of(call, tile.row + (query + i) / call.group), start);
    run.ends[i] = seen.end;
    run.slots.first = seen.first;
    run.slots.end = seen.end > run.slots.end ? seen.end : run.slots.end;
    run.all_end = seen.end < run.all_end ? seen.end : run.all_end;
  }
  return run;
}

// Decides which runs of a block prefetch what comes next: of those that attend to its last slot,
// the first ones, or all in turn. Only a single run prefetches twice: of several, the later ones
// find in cache what the first one has read.
template <typename T>
void share_fetches(Run* runs, int run_count) {
  int whole = 0, fetching = 0;
  for (int i = 0; i < run_count; ++i) whole += runs[i].slots.end == kBlock;
  const bool in_turns = kTakesTurns<T> && 1 < whole && whole <= kTurnsMax;
  const int fetching_max = in_turns ? whole : kFetchRuns;
  for (int i = 0; i < run_count && fetching < fetching_max; ++i) {
    if (runs[i].slots.end != kBlock) continue;
    runs[i].fetch = in_turns ? Fetch::kInTurn : Fetch::kOnce;
    runs[i].turn = fetching++;
    runs[i].turns = whole;
  }
  if (run_count == 1 && whole && pm::fetches_far) runs[0].fetch = Fetch::kTwice;
}

// Computes one block for all queries of some rows of a tile. Neighbouring queries that attend to
// all of it, or to its beginning, form runs of even length; the others are computed one by one.
template <typename T>
void tile_block(const AttentionCall& call, Tile tile, Rows rows, const Block<T>& block, long start,
                Scratch& scratch) {
  enum Sight { kNothing, kAll, kBeginning, kPart };
  const auto sight = [&](long query) {
    const Slots seen = slots_of(reach_of(call, tile.row + query / call.group), start);
    if (seen.first >= seen.end) return kNothing;
    return seen.first ? kPart : seen.end == kBlock ? kAll : kBeginning;
  };
  const long queries = rows.end * call.group;
  int run_count = 0;
  for (long query = rows.first * call.group; query < queries;) {
    const Sight sees = sight(query);
    long end = query + 1;
    while (sees != kPart && end < queries && sight(end) == sees) ++end;
    long pieces = sees == kNothing ? 0 : (end - query + kRunQueries<T> - 1) / kRunQueries<T>;
    for (; pieces > 0; --pieces) {
      const long count = (end - query + pieces - 1) / pieces;
      scratch.runs[run_count++] =
          run_at(call, tile, start, query, static_cast<int>(count), scratch);
      query += count;
    }
    query = end;
  }
  share_fetches<T>(scratch.runs, run_count);
  take_block(call, block, scratch.runs, run_count);
}

// Computes the blocks of positions [begin, end) for some rows of a tile, from the pages of the
// first of these rows.
template <typename T>
void take_blocks(const AttentionCall& call, Tile tile, Rows rows, long kv_head, long begin,
                 long end, Scratch& scratch) {
  const int first = tile.row + rows.first;
  const HeadPages<T> head{call.pages, call.tables + call.table_indptr[call.row_sequence[first]],
                          kv_head};
  // Blocks that rows of several sequences share are wholly within the reach of each row.
  const bool alike = tile.shared == INT_MAX;
  const Reach reach = alike ? reach_of(call, tile) : reach_of(call, first);
  end = end < reach.limit ? end : reach.limit;
  Block<T> block;
  for (long start = begin; start < end; start += kBlock) {
    const Slots slots = slots_of(reach, start);
    locate(head, start, slots, static_cast<typename T::Code*>(scratch.keys), &block);
    // Without a next block, and for slots before the first, an address that is valid to prefetch.
    for (auto& keys : block.next_keys) keys = block.keys[slots.first / kLanes];
    for (int slot = 0; slot < slots.first; ++slot) block.values[slot] = block.values[slots.first];
    const long next = start + kBlock;
    if (next < reach.limit && head.whole_vectors()) {
      locate_keys(head, next, slots_of(reach, next), block.next_keys);
      touch_next(call.pages, block);
    }
    tile_block(call, tile, rows, block, start, scratch);
  }
}

// The states of a tile's queries over one span, into scratch.span.
template <typename T>
void tile_span(const AttentionCall& call, Tile tile, long kv_head, long span, Scratch& scratch) {
  for (long query = 0; query < tile.rows * call.group; ++query) {
    State state = state_at(scratch.span, query, call.width);
    memset(state.words, 0, sizeof(float) * static_cast<size_t>(state_floats(call.width)));
    state.peak() = -FLT_MAX;  // the peak of no scores, above one of minus infinity
  }
  const Reach reach = reach_of(call, tile);
  const long begin = span * kSpan > reach.low ? span * kSpan : reach.low / kBlock * kBlock;
  const long end = (span + 1) * kSpan < reach.limit ? (span + 1) * kSpan : reach.limit;
  if (tile.shared >= end) {
    return take_blocks<T>(call, tile, {0, tile.rows}, kv_head, begin, end, scratch);
  }
  const long apart = tile.shared > begin ? tile.shared : begin;
  take_blocks<T>(call, tile, {0, tile.rows}, kv_head, begin, apart, scratch);
  for (int i = 0; i < tile.rows; ++i) {
    take_blocks<T>(call, tile, {i, i + 1}, kv_head, apart, end, scratch);
  }
}

// All spans of a tile one after the other, merged as they come.
template <typename T>
void whole_tile(const AttentionCall& call, Tile tile, long kv_head, Scratch& scratch) {
  const long queries = tile.rows * call.group;
  pack_queries(call, tile, kv_head, scratch);
  for (long query = 0; query < queries; ++query) {
    state_at(scratch.merged, query, call.width).sum() = 0.0f;
  }
  const Spans spans(reach_of(call, tile));
  for (long span = spans.first; span < spans.end; ++span) {
    tile_span<T>(call, tile, kv_head, span, scratch);
    for (long query = 0; query < queries; ++query) {
      if (Spans(reach_of(call, tile.row + query / call.group)).has(span)) {
        merge_state(state_at(scratch.merged, query, call.width),
                    state_at(scratch.span, query, call.width), call.width);
      }
    }
  }
  for (long query = 0; query < queries; ++query) {
    write_out(call, tile.row + query / call.group, kv_head * call.group + query % call.group,
              state_at(scratch.merged, query, call.width));
  }
}

// Units [begin, end) of a SpanPlan.
struct Round {
  long begin, end;
};

// How the spans of few rows are divided among threads. A unit is one span of one tile. The states
// of units are kept until a barrier and then merged in order. As many units as there is room for
// make a round. The room is a ring with one place more: where a round ends within a tile, what was
// merged so far stays in the place of the round's last unit.
struct SpanPlan {
  const Tile* tiles;
  long tile_count;
  long* first_unit;  // of each tile, [tile_count + 1]
  float* states;     // [unit % (round_units + 1)][kv_head][query]
  long unit_floats;  // per KV head
  long round_units;

  long units() const { return first_unit[tile_count]; }
  long tile_of(long unit) const {
    long low = 0, high = tile_count;
    while (high - low > 1) {
      const long middle = (low + high) / 2;
      (first_unit[middle] <= unit ? low : high) = middle;
    }
    return low;
  }
  float* states_of(const AttentionCall& call, long unit, long kv_head) const {
    return states + (unit % (round_units + 1) * call.pages.kv_heads + kv_head) * unit_floats;
  }
};

template <typename T>
void span_unit(const AttentionCall& call, const SpanPlan& plan, long unit, long kv_head,
               Scratch& scratch) {
  const long index = plan.tile_of(unit);
  const Tile tile = plan.tiles[index];
  const long span = Spans(reach_of(call, tile)).first + unit - plan.first_unit[index];
  pack_queries(call, tile, kv_head, scratch);
  tile_span<T>(call, tile, kv_head, span, scratch);
  const size_t floats = static_cast<size_t>(tile.rows * call.group * state_floats(call.width));
  memcpy(plan.states_of(call, unit, kv_head), scratch.span, sizeof(float) * floats);
}

// Merges the spans of a tile that a round has computed, and writes out the rows that are complete.
void merge_tile(const AttentionCall& call, const SpanPlan& plan, Round round, long index,
                long kv_head) {
  const Tile tile = plan.tiles[index];
  const long unit_of_span_0 = plan.first_unit[index] - Spans(reach_of(call, tile)).first;
  const long low = round.begin - unit_of_span_0, high = round.end - unit_of_span_0;
  for (long query = 0; query < tile.rows * call.group; ++query) {
    const long row = tile.row + query / call.group;
    const Spans spans(reach_of(call, row));
    if (spans.end <= low || high <= spans.first) continue;
    const auto state = [&](long span) {
      return state_at(plan.states_of(call, unit_of_span_0 + span, kv_head), query, call.width);
    };
    const long first = spans.first < low ? low - 1 : spans.first;
    const long end = spans.end < high ? spans.end : high;
    for (long span = first + 1; span < end; ++span) {
      merge_state(state(first), state(span), call.width);
    }
    if (spans.end <= high) {
      write_out(call, row, kv_head * call.group + query % call.group, state(first));
    } else if (first < high - 1) {
      memcpy(state(high - 1).words, state(first).words,
             sizeof(float) * static_cast<size_t>(state_floats(call.width)));
    }
  }
}

inline uintptr_t aligned(uintptr_t address) { return (address + 63) & ~uintptr_t{63}; }

struct ThreadScratch {
  Scratch scratch;
  void* memory;

  // For tiles of up to `unit_queries` queries per KV head.
  ThreadScratch(const AttentionCall& call, long unit_queries) {
    const long queries = call.group > unit_queries ? call.group : unit_queries;
    const long states = queries * state_floats(call.width);
    const long packed = queries * call.width, weights = queries * kBlock;
    const long keys = call.pages.page_size % kLanes ? call.pages.head_dim * kBlock : 0;
    const long floats = 2 * states + packed + weights + keys + queries;
    memory = pm::take_memory(sizeof(float) * static_cast<size_t>(floats) +
                             sizeof(Run) * static_cast<size_t>(queries) + 2 * 64);
    float* at = reinterpret_cast<float*>(aligned(reinterpret_cast<uintptr_t>(memory)));
    scratch.span = at;
    scratch.merged = at + states;
    scratch.q = at + 2 * states;
    scratch.weights = scratch.q + packed;
    scratch.keys = scratch.weights + weights;
    scratch.keep = scratch.weights + weights + keys;
    scratch.runs =
        reinterpret_cast<Run*>(aligned(reinterpret_cast<uintptr_t>(scratch.keep + queries)));
  }
  ~ThreadScratch() { free(memory); }
};

// How many positions from 0 on, in whole blocks, two rows read from the same pages.
long shared_positions(const AttentionCall& call, long row, long other) {
  const int32_t* own = call.tables + call.table_indptr[call.row_sequence[row]];
  const int32_t* others = call.tables + call.table_indptr[call.row_sequence[other]];
  const long limit = reach_of(call, row).limit, limit_other = reach_of(call, other).limit;
  const long most = (limit < limit_other ? limit : limit_other) / call.pages.page_size;
  long pages = 0;
  while (pages < most && own[pages] == others[pages]) ++pages;
  return pages * call.pages.page_size / kBlock * kBlock;
}

// Divides the rows into tiles; returns how many. A tile is either neighbouring rows of one
// sequence, or single rows of up to `joined_max` sequences that share most of their positions.
// Under a window only the former, and with neighbouring positions, so that every position within
// the tile's reach is within that of one of its rows. A tile has at most `unit_queries` queries per
// KV head, or one row.
long make_tiles(const AttentionCall& call, long unit_queries, long joined_max, Tile* tiles) {
  const long rows_max = call.group >= unit_queries ? 1 : unit_queries / call.group;
  const auto sequence = [&](long row) { return row < call.rows ? call.row_sequence[row] : -1; };
  joined_max = joined_max < rows_max ? joined_max : rows_max;
  long count = 0;
  for (long row = 0; row < call.rows; ++row) {
    Tile* last = count ? &tiles[count - 1] : nullptr;
    if (last && sequence(row) == sequence(row - 1)) {
      const long step = call.row_position[row] - call.row_position[row - 1];
      if (row - last->row < rows_max && (call.window == LONG_MAX || (-1 <= step && step <= 1))) {
        ++last->rows;
        continue;
      }
    } else if (last && row - last->row < joined_max && call.window == LONG_MAX &&
               sequence(row) != sequence(row + 1) &&
               (last->rows == 1 || last->shared != INT_MAX)) {
      const long all = last->shared, own = shared_positions(call, row, last->row);
      const long shared = own < all ? own : all;
      if (2 * shared >= reach_of(call, row).limit) {
        ++last->rows;
        last->shared = static_cast<int>(shared);
        continue;
      }
    }
    tiles[count++] = {static_cast<int>(row), 1, INT_MAX};
  }
  return count;
}

}  // namespace
