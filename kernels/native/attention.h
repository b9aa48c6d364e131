// Attention of ragged rows over paged K and V: how it is spread over threads.
// The arithmetic of a block, and why no rounding depends on the spread: attention_block.h.
#pragma once

#include "attention_tile.h"

namespace {

// Below some 80 us of work (see parallel.h), in multiply-adds.
constexpr long kAttentionWork = 1 << 20;
constexpr long kUnitsPerThread = 8;

inline long attention_work(const AttentionCall& call) {
  long positions = 0;
  for (long row = 0; row < call.rows; ++row) {
    const Reach reach = reach_of(call, row);
    positions += reach.limit - reach.low;
  }
  return positions * call.group * call.pages.kv_heads * call.pages.head_dim * 2;
}

// Queries of a tile for each KV head. The more, the less often K and V are read; and yet so few
// that each thread has several tiles, the last of which others wait for.
inline long unit_queries_of(const AttentionCall& call, int threads) {
  const long each = call.rows * call.group * call.pages.kv_heads / (kUnitsPerThread * threads);
  return each < kUnitQueriesMin ? kUnitQueriesMin : each < kUnitQueriesMax ? each : kUnitQueriesMax;
}

// How a batch's rows are spread: made once a step, used by every layer. Tiles go to threads
// whole, or by span when there are too few of them to go round.
struct AttentionPlan {
  long unit_queries = kUnitQueriesMin;
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
  plan->tiles = pm::take<Tile>(static_cast<size_t>(call.rows));
  // Not so few tiles that threads are left without.
  const long joined_max = call.rows * call.pages.kv_heads / (2 * threads);
  plan->unit_queries = unit_queries_of(call, threads);
  plan->tile_count = make_tiles(call, plan->unit_queries, joined_max, plan->tiles);
  long spans_max = 0, rows_max = 1, units = 0;
  for (long i = 0; i < plan->tile_count; ++i) {
    const long own = Spans(reach_of(call, plan->tiles[i])).count();
    spans_max = own > spans_max ? own : spans_max;
  }
  const bool enough = plan->tile_count * call.pages.kv_heads >= 4 * threads;
  plan->by_span = threads > 1 && !enough && spans_max > 1;
  if (!plan->by_span) return;
  SpanPlan& spans = plan->spans;
  spans = {plan->tiles, plan->tile_count, nullptr, nullptr, 0};
  spans.first_unit = pm::take<long>(static_cast<size_t>(plan->tile_count + 1));
  for (long i = 0; i < plan->tile_count; ++i) {
    spans.first_unit[i] = units;
    units += Spans(reach_of(call, plan->tiles[i])).count();
    rows_max = plan->tiles[i].rows > rows_max ? plan->tiles[i].rows : rows_max;
  }
  spans.first_unit[plan->tile_count] = units;
  spans.unit_floats = rows_max * call.group * state_floats(call.width);
  spans.states =
      pm::take<float>(static_cast<size_t>(units * call.pages.kv_heads * spans.unit_floats));
}

template <typename T>
void attend_as(const AttentionCall& call, const AttentionPlan& plan, pm::Counter& work,
               Scratch& scratch) {
  const long kv_heads = call.pages.kv_heads;
  long unit, end;
  while (work.take(plan.units(call), 1, &unit, &end)) {
    if (plan.by_span) {
      span_unit<T>(call, plan.spans, unit / kv_heads, unit % kv_heads, scratch);
    } else {
      // Last tiles first: within a chunk they see the most.
      whole_tile<T>(call, plan.tiles[plan.tile_count - 1 - unit / kv_heads], unit % kv_heads,
                    scratch);
    }
  }
}

// One thread's share of a planned call; every thread of a region calls it with the same
// counters, over plan.units() and plan.merges().
void attend(const AttentionCall& call, const AttentionPlan& plan, pm::Counter& work,
            pm::Counter& merges, Scratch& scratch) {
  with_kv_type(call.pages,
               [&](auto type) { attend_as<decltype(type)>(call, plan, work, scratch); });
  if (!plan.by_span) return;
  const long kv_heads = call.pages.kv_heads;
  long unit, end;
  pm::barrier();
  while (merges.take(plan.merges(call), 1, &unit, &end)) {
    merge_tile(call, plan.spans, unit / kv_heads, unit % kv_heads);
  }
}

// 0, or 1 + the first row without pages in the pool for all that it sees.
long check_rows(const AttentionCall& call, long sequences) {
  const PmPages& pages = call.pages;
  long checked_first = 0, checked_end = 0;  // pages of the sequence at hand that were looked at
  for (long row = 0; row < call.rows; ++row) {
    const long sequence = call.row_sequence[row], position = call.row_position[row];
    if (sequence < 0 || sequence >= sequences || position < 0) return 1 + row;
    const long table = call.table_indptr[sequence];
    const long first = reach_of(call, row).low / pages.page_size;
    const long end = position / pages.page_size + 1;
    if (call.table_indptr[sequence + 1] - table < end) return 1 + row;
    const bool again = row && call.row_sequence[row - 1] == sequence && checked_first <= first &&
                       first <= checked_end;
    if (!again) checked_first = checked_end = first;
    for (; checked_end < end; ++checked_end) {
      const int32_t page = call.tables[table + checked_end];
      if (page < 0 || page >= pages.page_count) return 1 + row;
    }
  }
  return 0;
}

long paged_attention(const PmPages* pages, const float* q, long q_stride, float* out,
                     long out_stride, long rows, long q_heads, const int32_t* tables,
                     const int32_t* table_indptr, long sequences, const int32_t* row_sequence,
                     const int32_t* row_position, float scale, float soft_cap, long window_tokens,
                     int threads) {
  const long width = (pages->head_dim + kLanes - 1) / kLanes * kLanes;
  const AttentionCall call{
      *pages, q, q_stride, out, out_stride, rows, q_heads / pages->kv_heads, tables, table_indptr,
      row_sequence, row_position, scale, width, soft_cap, window_tokens};
  if (const long bad = check_rows(call, sequences)) return bad;
  if (rows == 0) return 0;
  if (attention_work(call) < kAttentionWork) threads = 1;
  AttentionPlan plan;
  plan_attention(call, threads, &plan);
  pm::Counter work, merging;
  pm::parallel(threads, [&] {
    ThreadScratch own(call, plan.unit_queries);
    attend(call, plan, work, merging, own.scratch);
  });
  return 0;
}

}  // namespace
