// Attention of ragged rows over paged K and V: how the work is divided among threads.
// attention_block.h has the arithmetic of a block, and the reason why no rounding depends on the
// division.
#pragma once

#include "attention_tile.h"

namespace {

// In multiply-adds, some 80 us of work; below that one thread is enough (see parallel.h).
constexpr long kAttentionWork = 1 << 20;
constexpr long kUnitsPerThread = 8;
// Limit of the memory for the states of spans, which would grow with threads times context.
constexpr long kSpanStatesBytes = 64L << 20;

inline long attention_work(const AttentionCall& call) {
  long positions = 0;
  for (long row = 0; row < call.rows; ++row) {
    const Reach reach = reach_of(call, row);
    positions += reach.limit - reach.low;
  }
  return positions * call.group * call.pages.kv_heads * call.pages.head_dim * 2;
}

// Queries in a tile, per KV head. The more there are, the less often K and V are read. But each
// thread should have several tiles, so that threads do not wait long for the one with the last
// tile.
inline long unit_queries_of(const AttentionCall& call, int threads) {
  const long each = call.rows * call.group * call.pages.kv_heads / (kUnitsPerThread * threads);
  return each < kUnitQueriesMin ? kUnitQueriesMin : each < kUnitQueriesMax ? each : kUnitQueriesMax;
}

// How a batch's rows are divided among threads: made once per step, used by every layer. Threads
// take whole tiles, or single spans of them if there are too few tiles for all threads.
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
};

void plan_attention(const AttentionCall& call, int threads, AttentionPlan* plan) {
  plan->tiles = pm::take<Tile>(static_cast<size_t>(call.rows));
  // Joining more sequences in a tile would leave too few tiles for all threads.
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
  spans = {plan->tiles, plan->tile_count, nullptr, nullptr, 0, 0};
  spans.first_unit = pm::take<long>(static_cast<size_t>(plan->tile_count + 1));
  for (long i = 0; i < plan->tile_count; ++i) {
    spans.first_unit[i] = units;
    units += Spans(reach_of(call, plan->tiles[i])).count();
    rows_max = plan->tiles[i].rows > rows_max ? plan->tiles[i].rows : rows_max;
  }
  spans.first_unit[plan->tile_count] = units;
  spans.unit_floats = rows_max * call.group * state_floats(call.width);
  const long floats = call.pages.kv_heads * spans.unit_floats;  // per unit
  const long places = kSpanStatesBytes / (floats * static_cast<long>(sizeof(float)));
  spans.round_units = units <= places ? units : places > 2 ? places - 1 : 1;
  const long taken = units < spans.round_units + 1 ? units : spans.round_units + 1;
  spans.states = pm::take<float>(static_cast<size_t>(taken * floats));
}

template <typename T>
void attend_tiles(const AttentionCall& call, const AttentionPlan& plan, pm::Counter& work,
                  Scratch& scratch) {
  const long kv_heads = call.pages.kv_heads;
  long unit, end;
  while (work.take(plan.tile_count * kv_heads, 1, &unit, &end)) {
    // Last tiles first: within a chunk they attend to the most positions.
    whole_tile<T>(call, plan.tiles[plan.tile_count - 1 - unit / kv_heads], unit % kv_heads,
                  scratch);
  }
}

template <typename T>
void attend_spans(const AttentionCall& call, const SpanPlan& plan, pm::Counter& work,
                  pm::Counter& merges, Scratch& scratch) {
  const long kv_heads = call.pages.kv_heads, units = plan.units();
  const bool first_thread = pm::thread_index() == 0;
  long at, end;
  for (Round round{0, 0}; round.end < units;) {
    if (round.end) {  // the states' places are free once all of them are merged
      pm::barrier();
      if (first_thread) merges.begin_anew();
    }
    const long most = round.end + plan.round_units;
    round = {round.end, most < units ? most : units};
    while (work.take((round.end - round.begin) * kv_heads, 1, &at, &end)) {
      span_unit<T>(call, plan, round.begin + at / kv_heads, at % kv_heads, scratch);
    }
    pm::barrier();
    if (first_thread) work.begin_anew();
    const long tile = plan.tile_of(round.begin);
    const long tiles = plan.tile_of(round.end - 1) + 1 - tile;
    while (merges.take(tiles * kv_heads, 1, &at, &end)) {
      merge_tile(call, plan, round, tile + at / kv_heads, at % kv_heads);
    }
  }
}

// One thread's share of a planned call; every thread of a region calls it with the same
// counters.
void attend(const AttentionCall& call, const AttentionPlan& plan, pm::Counter& work,
            pm::Counter& merges, Scratch& scratch) {
  with_kv_type(call.pages, [&](auto type) {
    using T = decltype(type);
    if (plan.by_span) return attend_spans<T>(call, plan.spans, work, merges, scratch);
    attend_tiles<T>(call, plan, work, scratch);
  });
}

// Returns 0, or 1 + the first row whose sequence or position is invalid, or which attends to a
// position that has no page in the pool.
long check_rows(const AttentionCall& call, long sequences) {
  const PmPages& pages = call.pages;
  long checked_first = 0, checked_end = 0;  // pages of the current sequence already checked
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
