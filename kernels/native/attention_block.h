// Attention of ragged rows over paged K and V. K lies transposed in its page, [head_dim][slot],
// so that sixteen slots' scores are one vector; V lies [slot][head_dim]. Codes become floats in
// registers; the scale of a slot's K multiplies its score, that of its V its weight.
//
// A query's positions are cut into spans of 512 and those into blocks of 64, at fixed absolute
// positions. Within a span blocks are taken in order by an online softmax (Milakov and
// Gimelshein, 2018); spans are merged in order by their log-sum-exp. Neither the other rows, nor
// how rows are tiled, nor which thread takes which span changes any rounding.
#pragma once

#include <float.h>
#include <limits.h>
#include <math.h>

#include "attention_caps.h"
#include "attention_pages.h"
#include "kernels.h"

namespace {

constexpr long kSpan = 512;
#if PM_LEVEL >= 1
constexpr int kTileQueries = 6, kUnitQueriesMin = 48, kUnitQueriesMax = 192;
#else
constexpr int kTileQueries = 1, kUnitQueriesMin = 24, kUnitQueriesMax = 24;
#endif
constexpr int kRunQueriesMax = PM_LEVEL >= 2 ? 8 : kTileQueries;
constexpr int kFetchQueries = 4;  // longer runs are bound by arithmetic
constexpr int kFetchRuns = 2;     // of a block that prefetch; the others only compute
constexpr int kTurnsMax = 8;      // up to this many runs take turns at prefetching
constexpr int kUnroll = PM_LEVEL == 1 ? 4 : 1;  // measured with AVX2 only

// Vectors of sums for each of Q queries that fit in registers at a time, besides the operands.
template <int Q>
constexpr int kHeldVectors = PM_LEVEL == 1 && Q > 1 ? (Q == 2 ? 2 : 1)
                             : Q > kTileQueries     ? 2
                                                    : kBlockVectors;

// The most queries of a run: more over narrow codes, because they share the cost of widening them.
template <typename T>
constexpr int kRunQueries = sizeof(typename T::Code) < 4 ? kRunQueriesMax : kTileQueries;

struct AttentionCall {
  PmPages pages;
  const float* q;
  long q_stride;
  float* out;
  long out_stride;
  long rows, group;  // group: query heads per KV head
  const int32_t* tables;
  const int32_t* table_indptr;
  const int32_t* row_sequence;
  const int32_t* row_position;
  float scale;
  long width;                 // head_dim rounded up to whole vectors
  float soft_cap = INFINITY;  // none
  long window = LONG_MAX;     // the most positions a row attends to, its own included
};

// Softmax state of one query: peak, sum of exponentials, weighted sum of V. A NaN score makes the
// sum NaN for good, whatever becomes of the peak and the values.
struct State {
  float* words;
  float& peak() const { return words[0]; }
  float& sum() const { return words[1]; }
  float* values() const { return words + kLanes; }
};

inline long state_floats(long width) { return width + kLanes; }

inline State state_at(float* states, long query, long width) {
  return {states + query * state_floats(width)};
}

void merge_state(State into, State from, long width) {
  if (into.sum() == 0.0f) {
    memcpy(into.words, from.words, sizeof(float) * static_cast<size_t>(state_floats(width)));
    return;
  }
  const float peak = into.peak() > from.peak() ? into.peak() : from.peak();
  const float keep = exponential(into.peak() - peak), take = exponential(from.peak() - peak);
  into.sum() = into.sum() * keep + from.sum() * take;
  into.peak() = peak;
  for (long i = 0; i < width; i += kLanes) {
    V scaled = mul(load(into.values() + i), splat(keep));
    store(into.values() + i, fma(load(from.values() + i), splat(take), scaled));
  }
}

void write_out(const AttentionCall& call, long row, long head, State state) {
  float* out = call.out + row * call.out_stride + head * call.pages.head_dim;
  const V scale = splat(1.0f / state.sum());
  for (long i = 0; i < call.pages.head_dim; i += kLanes) {
    store_some(out + i, mul(load(state.values() + i), scale), lanes_at(i, call.pages.head_dim));
  }
}

// How a run prefetches while it computes. kOnce: long before the data is read. kTwice: also one
// vector or strip before, since some prefetches are dropped when many are outstanding. kInTurn:
// runs that share a block take turns at its cache lines, which spreads the prefetches over their
// arithmetic.
enum class Fetch { kNothing, kOnce, kTwice, kInTurn };

// Whether kTwice pays where fetches_far is set, as measured with AVX2 on a Zen 3.
template <typename T, int Q>
constexpr bool kFetchesTwice =
    PM_LEVEL == 1 && sizeof(typename T::Code) == 4 && Q >= 2 && Q <= kFetchQueries;

// A run of neighbouring queries and their buffers for a block: packed queries `q`
// [count][head_dim], `states` [count][state_floats], `weights` [count][64], and `keep` [count], the
// factors by which earlier sums are scaled.
struct Run {
  const float* q;
  float* states;
  float* weights;
  float* keep;
  int count;
  Slots slots;               // slots of the block to which some query attends
  int all_end;               // every query attends to those before this one
  int ends[kRunQueriesMax];  // end of each query's slots
  Fetch fetch;
  int turn = 0, turns = 1;  // kInTurn: of `turns` lines it prefetches line `turn`
};

// Whether runs use kInTurn: over float32 with AVX-512, where it was measured.
template <typename T>
constexpr bool kTakesTurns = PM_LEVEL >= 2 && sizeof(typename T::Code) == 4;

// Vectors of codes in a cache line.
template <typename T>
constexpr int kLineVectors = 4 / sizeof(typename T::Code);

// Prefetches a line for a run of `queries` queries, into L2 if `far`, else into L1. Long runs, which
// are bound by arithmetic, prefetch nothing into L1, except the longest: these exist only over narrow
// codes and are like two short ones. The hardware drops part of a burst.
inline void fetch(const void* memory, bool far, int queries) {
  if (far) {
    prefetch_far(memory);
  } else if (queries <= kFetchQueries || queries > kTileQueries) {
    prefetch(memory);
  }
}

// Scores of N vectors of slots from `vector` on. While a block's K is read its V is prefetched, and
// while V is read the next block's K, which has as many vectors.
template <typename T, int Q, int N, Fetch FETCH>
void scores(const AttentionCall& call, const Block<T>& block, const Run& run, int vector,
            V (*out)[kBlockVectors]) {
  const long columns = call.pages.head_dim;
  const bool far = pm::fetches_far;  // a copy: the global would be read for every line
  V sum[Q][N];
  for (int i = 0; i < Q; ++i) {
    for (int j = 0; j < N; ++j) sum[i][j] = zero();
  }
  const int after = vector + N;  // what is read next: vectors of K, then the first strip of V
  long due = run.turn;
#pragma GCC unroll kUnroll
  for (long d = 0; d < columns; ++d) {
    V key[N];
    for (int j = 0; j < N; ++j) {
      key[j] = T::decode(block.keys[vector + j] + d * block.key_stride);
    }
    for (int j = 0; FETCH == Fetch::kTwice && j < N; ++j) {
      if (after < kBlockVectors) {
        prefetch(block.keys[after + j] + d * block.key_stride);
      } else if (d < kBlock) {
        prefetch(block.values[d] + j * kLanes);
      }
    }
    const bool fetches = FETCH == Fetch::kInTurn ? d == due : d % kLineVectors<T> == 0;
    if (FETCH != Fetch::kNothing && fetches) {
      due += run.turns;
      for (int j = 0; j < N; ++j) {
        fetch(block.values[(vector + j) * kLanes] + d * kLanes, far, Q);
      }
    }
    for (int i = 0; i < Q; ++i) {
      V value = splat(run.q[i * columns + d]);
      for (int j = 0; j < N; ++j) sum[i][j] = fma(value, key[j], sum[i][j]);
    }
  }
  for (int i = 0; i < Q; ++i) {
    for (int j = 0; j < N; ++j) {
      V score = mul(sum[i][j], splat(call.scale));
      if (T::kScaled) score = mul(score, load(block.key_scales + (vector + j) * kLanes));
      out[i][vector + j] = score;
    }
  }
}

// Caps the scores of vector j and sets those outside `slots` to minus infinity.
inline V visible(const AttentionCall& call, V score, Slots slots, int j) {
  if (call.soft_cap < INFINITY) score = capped(score, call.soft_cap);
  const int end = slots.end - j * kLanes, first = slots.first - j * kLanes;
  if (end < kLanes) score = fill_from(score, end > 0 ? end : 0, -INFINITY);
  return first > 0 ? fill_below(score, first, -INFINITY) : score;
}

// Scores of vectors [low, high), as many at a time as the instantiated kernels take.
template <typename T, int Q>
void all_scores(const AttentionCall& call, const Block<T>& block, const Run& run, int low, int high,
                V (*out)[kBlockVectors]) {
  constexpr int kHeld = kHeldVectors<Q>, kSome = kHeld < 2 ? kHeld : 2;
  const bool all = high - low == kBlockVectors;
  constexpr Fetch kNothing = Fetch::kNothing, kOnce = Fetch::kOnce;
  constexpr Fetch kMost = kFetchesTwice<T, Q> ? Fetch::kTwice : kOnce;
  constexpr Fetch kShared = kTakesTurns<T> ? Fetch::kInTurn : kOnce;
  if (all && run.fetch == Fetch::kTwice) {
    for (; low < high; low += kHeld) scores<T, Q, kHeld, kMost>(call, block, run, low, out);
  } else if (all && run.fetch == kOnce) {
    for (; low < high; low += kHeld) scores<T, Q, kHeld, kOnce>(call, block, run, low, out);
  } else if (all && run.fetch == Fetch::kInTurn) {
    for (; low < high; low += kHeld) scores<T, Q, kHeld, kShared>(call, block, run, low, out);
  } else if (all) {
    for (; low < high; low += kHeld) scores<T, Q, kHeld, kNothing>(call, block, run, low, out);
  }
  for (; low + kSome <= high; low += kSome) {
    scores<T, Q, kSome, kNothing>(call, block, run, low, out);
  }
  if (low < high) scores<T, Q, 1, kNothing>(call, block, run, low, out);
}

// Computes the softmax numerators of the block's slots and the factors for earlier sums (`keep`),
// and updates peaks and sums.
template <typename T, int Q>
void weigh(const AttentionCall& call, const Block<T>& block, const Run& run) {
  V score[Q][kBlockVectors];
  const int low = run.slots.first / kLanes, high = (run.slots.end + kLanes - 1) / kLanes;
  all_scores<T, Q>(call, block, run, low, high, score);
  float fall[kLanes] = {};  // old peak - new peak; all exponentials are taken at once
  for (int i = 0; i < Q; ++i) {
    V peaks = splat(-INFINITY);
    for (int j = 0; j < kBlockVectors; ++j) {
      const Slots seen{run.slots.first, run.ends[i]};
      score[i][j] =
          j < low || j >= high ? splat(-INFINITY) : visible(call, score[i][j], seen, j);
      peaks = max(peaks, score[i][j]);
    }
    const State state = state_at(run.states, i, call.width);
    const float block_peak = max_lanes(peaks), old_peak = state.peak();
    state.peak() = block_peak > old_peak ? block_peak : old_peak;
    fall[i] = old_peak - state.peak();
  }
  store(fall, exponential(load(fall)));
  for (int i = 0; i < Q; ++i) {
    const State state = state_at(run.states, i, call.width);
    V sums[kBlockVectors];
    for (int j = 0; j < kBlockVectors; ++j) {
      sums[j] = exponential(sub(score[i][j], splat(state.peak())));
      V weight = sums[j];
      if (T::kScaled) weight = mul(weight, load(block.value_scales + j * kLanes));
      store(run.weights + i * kBlock + j * kLanes, weight);
    }
    const float added = sum_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    run.keep[i] = fall[i];
    state.sum() = state.sum() * fall[i] + added;
  }
}

// Adds the weighted rows of V to N vectors of columns from `at` on. TAIL: the vector ends beyond
// the last column.
template <typename T, int Q, int N, Fetch FETCH, bool TAIL = false>
void add_values(const AttentionCall& call, const Block<T>& block, const Run& run, long at) {
  const long columns = call.pages.head_dim;
  const int lanes = lanes_at(at, columns);
  const bool far = pm::fetches_far;  // a copy: the global would be read for every line
  V sum[Q][N];
  for (int i = 0; i < Q; ++i) {
    const float* values = state_at(run.states, i, call.width).values() + at;
    for (int j = 0; j < N; ++j) sum[i][j] = mul(load(values + j * kLanes), splat(run.keep[i]));
  }
  const bool ends = at + N * kLanes >= columns;
  const auto add_slot = [&](int slot, bool by_all) {
    V value[N];
    const typename T::Code* from = block.values[slot] + at;
    for (int j = 0; FETCH == Fetch::kTwice && j < N; ++j) {  // the next strip, or the next K
      if (ends) {
        prefetch(block.next_keys[j] + slot * block.key_stride);
      } else {
        prefetch(from + (N + j) * kLanes);
      }
    }
    for (int j = 0; j < N; ++j) {
      value[j] = TAIL ? T::decode_some(from, lanes) : T::decode(from + j * kLanes);
    }
    for (int i = 0; i < Q; ++i) {
      if (!by_all && slot >= run.ends[i]) continue;  // not even times 0: it may be a NaN
      V weight = splat(run.weights[i * kBlock + slot]);
      for (int j = 0; j < N; ++j) sum[i][j] = fma(weight, value[j], sum[i][j]);
    }
  };
  // The slots of a strip prefetch its share of the next block's K, in order.
  int due = run.slots.first + run.turn;
  static_assert(kLanes % N == 0, "vectors of K are fetched N rows at a time");
  const long stride = block.key_stride, rows = call.width;
  const bool split = N < kLineVectors<T> && stride == kLanes;  // slots share a cache line
  const auto add_slots = [&](int slot, int end, bool by_all) {
    while (slot < end) {
      const long line = at / kLanes * kBlock + slot * N, row = line % rows, left = (rows - row) / N;
      const int stop = left < end - slot ? slot + static_cast<int>(left) : end;
      auto* keys = block.next_keys[line / rows] + row * stride;
      for (long next = row; slot < stop; ++slot, next += N, keys += N * stride) {
        const bool begins = !split || next % kLineVectors<T> == 0;
        if (FETCH == Fetch::kInTurn ? slot == due : begins) {
          due += run.turns;
          for (int j = 0; j < N; j += kLineVectors<T>) fetch(keys + j * stride, far, Q);
        }
        add_slot(slot, by_all);
      }
    }
    return slot;
  };
  int slot = run.slots.first;
  if (FETCH != Fetch::kNothing) {
    slot = add_slots(add_slots(slot, run.all_end, true), run.slots.end, false);
  }
#pragma GCC unroll kUnroll
  for (; slot < run.all_end; ++slot) add_slot(slot, true);
  for (; slot < run.slots.end; ++slot) add_slot(slot, false);
  for (int i = 0; i < Q; ++i) {
    float* values = state_at(run.states, i, call.width).values() + at;
    for (int j = 0; j < N; ++j) store(values + j * kLanes, sum[i][j]);
  }
}

// What to do with a block: its softmax (vectors = 0), or a strip of V's columns.
struct Part {
  int vectors;
  long at;
};

template <typename T, int Q, Fetch FETCH>
void take_strip(const AttentionCall& call, const Block<T>& block, const Run& run, Part part) {
  constexpr int kHeld = kHeldVectors<Q>, kWide = (Q <= 2 ? 2 : 1) * kHeld;
  if (part.vectors == 8) return add_values<T, Q, kWide, FETCH>(call, block, run, part.at);
  const long end = part.at + part.vectors * kLanes;
  if (end > call.pages.head_dim) return add_values<T, Q, 1, FETCH, true>(call, block, run, part.at);
  for (; part.at + kHeld * kLanes <= end; part.at += kHeld * kLanes) {
    add_values<T, Q, kHeld, FETCH>(call, block, run, part.at);
  }
  if (part.at + 2 * kLanes <= end) {
    add_values<T, Q, (kHeld < 2 ? 1 : 2), FETCH>(call, block, run, part.at);
    part.at += 2 * kLanes;
  }
  if (part.at < end) add_values<T, Q, 1, FETCH>(call, block, run, part.at);
}

template <typename T, int Q>
void take(const AttentionCall& call, const Block<T>& block, const Run& run, Part part) {
  constexpr Fetch kMost = kFetchesTwice<T, Q> ? Fetch::kTwice : Fetch::kOnce;
  constexpr Fetch kShared = kTakesTurns<T> ? Fetch::kInTurn : Fetch::kOnce;
  if (part.vectors == 0) return weigh<T, Q>(call, block, run);
  switch (run.fetch) {
    case Fetch::kTwice: return take_strip<T, Q, kMost>(call, block, run, part);
    case Fetch::kInTurn: return take_strip<T, Q, kShared>(call, block, run, part);
    case Fetch::kOnce: return take_strip<T, Q, Fetch::kOnce>(call, block, run, part);
    default: return take_strip<T, Q, Fetch::kNothing>(call, block, run, part);
  }
}

template <typename T>
void take_run(const AttentionCall& call, const Block<T>& block, const Run& run, Part part) {
  if constexpr (kRunQueries<T> == 8) {
    if (run.count == 8) return take<T, 8>(call, block, run, part);
    if (run.count == 7) return take<T, 7>(call, block, run, part);
  }
  switch (run.count) {
#if PM_LEVEL >= 1
    case 2: return take<T, 2>(call, block, run, part);
    case 3: return take<T, 3>(call, block, run, part);
    case 4: return take<T, 4>(call, block, run, part);
    case 5: return take<T, 5>(call, block, run, part);
    case 6: return take<T, 6>(call, block, run, part);
#endif
    default: return take<T, 1>(call, block, run, part);
  }
}

// Adds a block to the states of all runs: first K for every run, then V, one strip of columns at a
// time, so that the data which runs share stays in L1.
template <typename T>
void take_block(const AttentionCall& call, const Block<T>& block, const Run* runs, int run_count) {
  for (int i = 0; i < run_count; ++i) take_run(call, block, runs[i], {0, 0});
  const long columns = call.pages.head_dim;
  const int widest = PM_LEVEL >= 2 && run_count == 1 && runs[0].count <= 2 ? 8 : 4;
  for (long at = 0; at < columns;) {
    const long left = (columns - at) / kLanes;
    const int vectors = left >= widest ? widest : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    for (int i = 0; i < run_count; ++i) take_run(call, block, runs[i], {vectors, at});
    at += vectors * kLanes;
  }
}

}  // namespace
