// Tiles: runs of rows of one sequence that share each block of K and V while it is in cache.
#pragma once

#include <stdlib.h>

#include "attention_block.h"

namespace {

struct Scratch {
  float* q;        // the unit's queries, [query][head_dim]
  float* span;     // their states within the span at hand
  float* merged;   // and over the spans before it
  float* weights;  // [query][64]
  float* keep;     // [query]
  void* keys;      // [head_dim][64] codes, when pages are too small for whole vectors
  Run* runs;       // queries that see the whole block
};

struct Tile {
  int row, rows;
};

// Positions [low, limit).
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

// The slots within reach of the block at `start`; none when end <= first.
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

Run run_at(const AttentionCall& call, const Scratch& scratch, long query, int count) {
  return {scratch.q + query * call.pages.head_dim,
          scratch.span + query * state_floats(call.width), scratch.weights + query * kBlock,
          scratch.keep + query, count};
}

// One block for all queries of a tile: those that see all of it in even runs, the others singly.
template <typename T>
void tile_block(const AttentionCall& call, Tile tile, const Block<T>& block, long start,
                Scratch& scratch) {
  const long queries = tile.rows * call.group;
  const auto seen = [&](long query) {
    return slots_of(reach_of(call, tile.row + query / call.group), start);
  };
  const auto sees_all = [](Slots slots) { return slots.first == 0 && slots.end == kBlock; };
  int run_count = 0;
  for (long query = 0; query < queries;) {
    long end = query;
    while (end < queries && sees_all(seen(end))) ++end;
    long pieces = (end - query + kTileQueries - 1) / kTileQueries;
    for (; pieces > 0; --pieces) {
      const long count = (end - query + pieces - 1) / pieces;
      scratch.runs[run_count++] = run_at(call, scratch, query, static_cast<int>(count));
      query += count;
    }
    if (query == queries) break;
    const Slots slots = seen(query);
    if (slots.first < slots.end) {
      const Run run = run_at(call, scratch, query, 1);
      take_block(call, block, &run, 1, slots);
    }
    ++query;
  }
  take_block(call, block, scratch.runs, run_count, {0, kBlock});
}

// The states of a tile's queries over one span, into scratch.span.
template <typename T>
void tile_span(const AttentionCall& call, Tile tile, long kv_head, long span, Scratch& scratch) {
  for (long query = 0; query < tile.rows * call.group; ++query) {
    State state = state_at(scratch.span, query, call.width);
    memset(state.words, 0, sizeof(float) * static_cast<size_t>(state_floats(call.width)));
    state.peak() = -FLT_MAX;  // that of nothing: a score of minus infinity is still below
  }
  const HeadPages<T> head{
      call.pages, call.tables + call.table_indptr[call.row_sequence[tile.row]], kv_head};
  const Reach reach = reach_of(call, tile);
  const long low = reach.low / kBlock * kBlock;
  const long end = (span + 1) * kSpan < reach.limit ? (span + 1) * kSpan : reach.limit;
  Block<T> block;
  for (long start = span * kSpan > low ? span * kSpan : low; start < end; start += kBlock) {
    locate(head, start, slots_of(reach, start), static_cast<typename T::Code*>(scratch.keys),
           &block);
    memcpy(block.next_keys, block.keys, sizeof block.keys);
    const long next = start + kBlock;
    if (next < reach.limit && head.whole_vectors()) {
      locate_keys(head, next, slots_of(reach, next), block.next_keys);
    }
    tile_block(call, tile, block, start, scratch);
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

// Spans of few rows spread over threads: states kept aside, merged in order after a barrier.
struct SpanPlan {
  const Tile* tiles;
  long tile_count;
  long* first_unit;  // of each tile, units being (tile, span), [tile_count + 1]
  float* states;     // [unit][kv_head][query]
  long unit_floats;  // per KV head

  float* states_of(const AttentionCall& call, long unit, long kv_head) const {
    return states + (unit * call.pages.kv_heads + kv_head) * unit_floats;
  }
};

template <typename T>
void span_unit(const AttentionCall& call, const SpanPlan& plan, long unit, long kv_head,
               Scratch& scratch) {
  long low = 0, high = plan.tile_count;
  while (high - low > 1) {
    const long middle = (low + high) / 2;
    (plan.first_unit[middle] <= unit ? low : high) = middle;
  }
  const Tile tile = plan.tiles[low];
  const long span = Spans(reach_of(call, tile)).first + unit - plan.first_unit[low];
  pack_queries(call, tile, kv_head, scratch);
  tile_span<T>(call, tile, kv_head, span, scratch);
  const size_t floats = static_cast<size_t>(tile.rows * call.group * state_floats(call.width));
  memcpy(plan.states_of(call, unit, kv_head), scratch.span, sizeof(float) * floats);
}

void merge_tile(const AttentionCall& call, const SpanPlan& plan, long index, long kv_head) {
  const Tile tile = plan.tiles[index];
  const long unit_of_span_0 = plan.first_unit[index] - Spans(reach_of(call, tile)).first;
  for (long query = 0; query < tile.rows * call.group; ++query) {
    const long row = tile.row + query / call.group;
    const Spans spans(reach_of(call, row));
    const auto state = [&](long span) {
      return state_at(plan.states_of(call, unit_of_span_0 + span, kv_head), query, call.width);
    };
    for (long span = spans.first + 1; span < spans.end; ++span) {
      merge_state(state(spans.first), state(span), call.width);
    }
    write_out(call, row, kv_head * call.group + query % call.group, state(spans.first));
  }
}

inline uintptr_t aligned(uintptr_t address) { return (address + 63) & ~uintptr_t{63}; }

struct ThreadScratch {
  Scratch scratch;
  void* memory;

  explicit ThreadScratch(const AttentionCall& call) {
    const long queries = call.group > kUnitQueries ? call.group : kUnitQueries;
    const long states = queries * state_floats(call.width);
    const long packed = queries * call.width, weights = queries * kBlock;
    const long keys = call.pages.page_size % kLanes ? call.pages.head_dim * kBlock : 0;
    const long floats = 2 * states + packed + weights + keys + queries;
    memory = malloc(sizeof(float) * static_cast<size_t>(floats) +
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

// Rows side by side of one sequence. Under a window their positions must be neighbours, so that
// every position within reach of a tile is within that of one of its rows.
long make_tiles(const AttentionCall& call, Tile* tiles) {
  const long rows_max = call.group >= kUnitQueries ? 1 : kUnitQueries / call.group;
  long count = 0;
  for (long row = 0; row < call.rows; ++row) {
    const long step = row ? call.row_position[row] - call.row_position[row - 1] : 0;
    const bool joins = count && row - tiles[count - 1].row < rows_max &&
                       call.row_sequence[row] == call.row_sequence[row - 1] &&
                       (call.window == LONG_MAX || (-1 <= step && step <= 1));
    if (joins) ++tiles[count - 1].rows;
    else tiles[count++] = {static_cast<int>(row), 1};
  }
  return count;
}

}  // namespace
