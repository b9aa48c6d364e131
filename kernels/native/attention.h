// Attention of ragged rows over paged K and V: how rows and spans of positions are spread.
// The arithmetic of a block, and why no rounding depends on the spread: attention_block.h.
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
  float* keys;     // [head_dim][64], when pages are too small for whole vectors
  Run* runs;       // queries that see the whole block
};

// A run of rows of one sequence whose queries share each block of K and V while it is in cache.
struct Tile {
  int row, rows;
};

inline long limit_of(const AttentionCall& call, long row) { return call.row_position[row] + 1; }

// Below some 80 us of work (see parallel.h), in multiply-adds.
constexpr long kAttentionWork = 1 << 20;

inline long attention_work(const AttentionCall& call) {
  long positions = 0;
  for (long row = 0; row < call.rows; ++row) positions += limit_of(call, row);
  return positions * call.group * call.pages.kv_heads * call.pages.head_dim * 2;
}

inline long tile_limit(const AttentionCall& call, Tile tile) {
  long limit = 0;
  for (int i = 0; i < tile.rows; ++i) {
    const long own = limit_of(call, tile.row + i);
    limit = own > limit ? own : limit;
  }
  return limit;
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
void tile_block(const AttentionCall& call, Tile tile, const Block& block, long start,
                Scratch& scratch) {
  const long queries = tile.rows * call.group;
  int run_count = 0;
  for (long query = 0; query < queries;) {
    long end = query;
    while (end < queries && limit_of(call, tile.row + end / call.group) - start >= kBlock) ++end;
    long pieces = (end - query + kTileQueries - 1) / kTileQueries;
    for (; pieces > 0; --pieces) {
      const long count = (end - query + pieces - 1) / pieces;
      scratch.runs[run_count++] = run_at(call, scratch, query, static_cast<int>(count));
      query += count;
    }
    if (query == queries) break;
    const long seen = limit_of(call, tile.row + query / call.group) - start;
    if (seen > 0) {
      const Run run = run_at(call, scratch, query, 1);
      take_block(call, block, &run, 1, static_cast<int>(seen));
    }
    ++query;
  }
  take_block(call, block, scratch.runs, run_count, kBlock);
}

// The states of a tile's queries over one span, into scratch.span.
void tile_span(const AttentionCall& call, Tile tile, long kv_head, long span, Scratch& scratch) {
  for (long query = 0; query < tile.rows * call.group; ++query) {
    State state = state_at(scratch.span, query, call.width);
    memset(state.words, 0, sizeof(float) * static_cast<size_t>(state_floats(call.width)));
    state.peak() = -INFINITY;
  }
  const int32_t* table = call.tables + call.table_indptr[call.row_sequence[tile.row]];
  const long limit = tile_limit(call, tile);
  const long end = (span + 1) * kSpan < limit ? (span + 1) * kSpan : limit;
  for (long start = span * kSpan; start < end; start += kBlock) {
    const int count = end - start < kBlock ? static_cast<int>(end - start) : kBlock;
    Block block;
    locate(call, table, kv_head, start, count, scratch.keys, &block);
    tile_block(call, tile, block, start, scratch);
  }
}

inline long span_count(long limit) { return (limit + kSpan - 1) / kSpan; }

// All spans of a tile one after the other, merged as they come.
void whole_tile(const AttentionCall& call, Tile tile, long kv_head, Scratch& scratch) {
  const long queries = tile.rows * call.group;
  pack_queries(call, tile, kv_head, scratch);
  for (long query = 0; query < queries; ++query) {
    state_at(scratch.merged, query, call.width).peak() = -INFINITY;
  }
  const long spans = span_count(tile_limit(call, tile));
  for (long span = 0; span < spans; ++span) {
    tile_span(call, tile, kv_head, span, scratch);
    for (long query = 0; query < queries; ++query) {
      if (span < span_count(limit_of(call, tile.row + query / call.group))) {
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
};

void span_unit(const AttentionCall& call, const SpanPlan& plan, long unit, long kv_head,
               Scratch& scratch) {
  long low = 0, high = plan.tile_count;
  while (high - low > 1) {
    const long middle = (low + high) / 2;
    (plan.first_unit[middle] <= unit ? low : high) = middle;
  }
  const Tile tile = plan.tiles[low];
  pack_queries(call, tile, kv_head, scratch);
  tile_span(call, tile, kv_head, unit - plan.first_unit[low], scratch);
  const size_t floats =
      static_cast<size_t>(tile.rows * call.group * state_floats(call.width));
  memcpy(plan.states + (unit * call.pages.kv_heads + kv_head) * plan.unit_floats, scratch.span,
         sizeof(float) * floats);
}

void merge_tile(const AttentionCall& call, const SpanPlan& plan, long index, long kv_head) {
  const Tile tile = plan.tiles[index];
  const long first = plan.first_unit[index];
  for (long query = 0; query < tile.rows * call.group; ++query) {
    const long row = tile.row + query / call.group;
    float* base = plan.states + (first * call.pages.kv_heads + kv_head) * plan.unit_floats;
    State merged = state_at(base, query, call.width);
    for (long span = 1; span < span_count(limit_of(call, row)); ++span) {
      base = plan.states + ((first + span) * call.pages.kv_heads + kv_head) * plan.unit_floats;
      merge_state(merged, state_at(base, query, call.width), call.width);
    }
    write_out(call, row, kv_head * call.group + query % call.group, merged);
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
    scratch.keep = scratch.keys + keys;
    scratch.runs =
        reinterpret_cast<Run*>(aligned(reinterpret_cast<uintptr_t>(scratch.keep + queries)));
  }
  ~ThreadScratch() { free(memory); }
};

long make_tiles(const AttentionCall& call, Tile* tiles) {
  const long rows_max = call.group >= kUnitQueries ? 1 : kUnitQueries / call.group;
  long count = 0;
  for (long row = 0; row < call.rows; ++row) {
    const bool joins = count && row - tiles[count - 1].row < rows_max &&
                       call.row_sequence[row] == call.row_sequence[row - 1];
    if (joins) ++tiles[count - 1].rows;
    else tiles[count++] = {static_cast<int>(row), 1};
  }
  return count;
}

// How a batch's rows are spread: made once a step, used by every layer. Tiles go to threads
// whole, or by span when there are too few of them to go round.
struct AttentionPlan {
  Tile* tiles = nullptr;
  long tile_count = 0;
  bool by_span = false;
  SpanPlan spans{};

  AttentionPlan() = default;
  AttentionPlan(const AttentionPlan&) = delete;
  AttentionPlan& operator=(const AttentionPlan&) = delete;
  ~AttentionPlan() {
    free(spans.states);
    free(spans.first_unit);
    free(tiles);
  }

  // Units of work for a Counter: of the states, then (by span alone) of their merging.
  long units(const AttentionCall& call) const {
    return (by_span ? spans.first_unit[tile_count] : tile_count) * call.pages.kv_heads;
  }
  long merges(const AttentionCall& call) const {
    return by_span ? tile_count * call.pages.kv_heads : 0;
  }
};

void plan_attention(const AttentionCall& call, int threads, AttentionPlan* plan) {
  plan->tiles = static_cast<Tile*>(malloc(sizeof(Tile) * static_cast<size_t>(call.rows)));
  plan->tile_count = make_tiles(call, plan->tiles);
  long limit = 0, rows_max = 1, units = 0;
  for (long i = 0; i < plan->tile_count; ++i) {
    const long own = tile_limit(call, plan->tiles[i]);
    limit = own > limit ? own : limit;
  }
  const bool enough = plan->tile_count * call.pages.kv_heads >= 4 * threads;
  plan->by_span = threads > 1 && !enough && span_count(limit) > 1;
  if (!plan->by_span) return;
  SpanPlan& spans = plan->spans;
  spans = {plan->tiles, plan->tile_count, nullptr, nullptr, 0};
  spans.first_unit =
      static_cast<long*>(malloc(sizeof(long) * static_cast<size_t>(plan->tile_count + 1)));
  for (long i = 0; i < plan->tile_count; ++i) {
    spans.first_unit[i] = units;
    units += span_count(tile_limit(call, plan->tiles[i]));
    rows_max = plan->tiles[i].rows > rows_max ? plan->tiles[i].rows : rows_max;
  }
  spans.first_unit[plan->tile_count] = units;
  spans.unit_floats = rows_max * call.group * state_floats(call.width);
  spans.states = static_cast<float*>(
      malloc(sizeof(float) * static_cast<size_t>(units * call.pages.kv_heads * spans.unit_floats)));
}

// One thread's share of a planned call; every thread of a region calls it with the same
// counters, over plan.units() and plan.merges().
void attend(const AttentionCall& call, const AttentionPlan& plan, pm::Counter& work,
            pm::Counter& merges, Scratch& scratch) {
  const long kv_heads = call.pages.kv_heads;
  long unit, end;
  while (work.take(plan.units(call), 1, &unit, &end)) {
    if (plan.by_span) {
      span_unit(call, plan.spans, unit / kv_heads, unit % kv_heads, scratch);
    } else {
      // Last tiles first: within a chunk they see the most.
      whole_tile(call, plan.tiles[plan.tile_count - 1 - unit / kv_heads], unit % kv_heads,
                 scratch);
    }
  }
  if (!plan.by_span) return;
  pm::barrier();
  while (merges.take(plan.merges(call), 1, &unit, &end)) {
    merge_tile(call, plan.spans, unit / kv_heads, unit % kv_heads);
  }
}

long check_rows(const AttentionCall& call, long sequences) {
  const PmPages& pages = call.pages;
  for (long row = 0; row < call.rows; ++row) {
    const long sequence = call.row_sequence[row], position = call.row_position[row];
    if (sequence < 0 || sequence >= sequences || position < 0) return 1 + row;
    const long first = call.table_indptr[sequence];
    const long held = call.table_indptr[sequence + 1] - first;
    const long needed = position / pages.page_size + 1;
    if (held < needed) return 1 + row;
    if (row && call.row_sequence[row - 1] == sequence && call.row_position[row - 1] >= position) {
      continue;  // these pages were just checked
    }
    const long checked = row && call.row_sequence[row - 1] == sequence
                             ? call.row_position[row - 1] / pages.page_size + 1
                             : 0;
    for (long i = checked; i < needed; ++i) {
      const int32_t page = call.tables[first + i];
      if (page < 0 || page >= pages.page_count) return 1 + row;
    }
  }
  return 0;
}

long paged_attention(const PmPages* pages, const float* q, long q_stride, float* out,
                     long out_stride, long rows, long q_heads, const int32_t* tables,
                     const int32_t* table_indptr, long sequences, const int32_t* row_sequence,
                     const int32_t* row_position, float scale, int threads) {
  const long width = (pages->head_dim + kLanes - 1) / kLanes * kLanes;
  const AttentionCall call{*pages, q, q_stride, out, out_stride, rows, q_heads / pages->kv_heads,
                           tables, table_indptr, row_sequence, row_position, scale, width};
  if (const long bad = check_rows(call, sequences)) return bad;
  if (rows == 0) return 0;
  if (attention_work(call) < kAttentionWork) threads = 1;
  AttentionPlan plan;
  plan_attention(call, threads, &plan);
  pm::Counter work, merging;
  pm::parallel(threads, [&] {
    ThreadScratch own(call);
    attend(call, plan, work, merging, own.scratch);
  });
  return 0;
}

}  // namespace
