// Attention of ragged rows over paged K and V. K lies transposed in its page, [head_dim][slot],
// so that sixteen slots' scores are one vector; V lies [slot][head_dim].
//
// A query's positions are cut into spans of 512 and those into blocks of 64, at fixed absolute
// positions. Within a span blocks are taken in order by an online softmax (Milakov and
// Gimelshein, 2018); spans are merged in order by their log-sum-exp. Neither the other rows, nor
// how rows are tiled, nor which thread takes which span changes any rounding.
#pragma once

#include <math.h>

namespace {

constexpr int kBlock = 64, kBlockVectors = kBlock / kLanes;
constexpr long kSpan = 512;
#if PM_LEVEL == 2
constexpr int kTileQueries = 6, kUnitQueries = 48;
#else
constexpr int kTileQueries = 1, kUnitQueries = 24;
#endif
constexpr long kAheadRows = 16;  // of K fetched ahead: V follows K, so the end fetches V

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
  long width;  // head_dim rounded up to whole vectors
};

// Softmax state of one query: peak, sum of exponentials, weighted sum of V.
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
  if (into.peak() == -INFINITY) {
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

// Where a block's K and V are. K vector j at dimension d: keys[j] + d * key_stride.
struct Block {
  const float* keys[kBlockVectors];
  long key_stride;
  const float* values[kBlock];
};

void locate(const AttentionCall& call, const int32_t* table, long kv_head, long start, int count,
            float* key_copy, Block* block) {
  const PmPages& pages = call.pages;
  const bool whole = pages.page_size % kLanes == 0;
  block->key_stride = whole ? pages.page_size : kBlock;
  for (int slot = 0; slot < count; ++slot) {
    const long position = start + slot;
    const long offset = position % pages.page_size;
    const float* head = pages.base + table[position / pages.page_size] * pages.page_stride +
                        kv_head * pages.head_stride;
    block->values[slot] = head + pages.value_offset + offset * pages.head_dim;
    if (whole) {
      if (slot % kLanes == 0) block->keys[slot / kLanes] = head + offset;
    } else {
      for (long d = 0; d < pages.head_dim; ++d) {
        key_copy[d * kBlock + slot] = head[d * pages.page_size + offset];
      }
    }
  }
  if (!whole) {
    for (int j = 0; j < kBlockVectors; ++j) block->keys[j] = key_copy + j * kLanes;
  }
}

// A run of queries and what a block does to them: states and packed queries lie one after the
// other, [run][state_floats] and [run][head_dim]; `weights` is [run][64], `keep` [run].
struct Run {
  const float* q;
  float* states;
  float* weights;
  float* keep;
  int count;
};

template <int Q, int N>
void scores(const AttentionCall& call, const Block& block, const float* q, int vector,
            V (*out)[kBlockVectors]) {
  const long columns = call.pages.head_dim;
  V sum[Q][N];
  for (int i = 0; i < Q; ++i) {
    for (int j = 0; j < N; ++j) sum[i][j] = zero();
  }
  for (long d = 0; d < columns; ++d) {
    V key[N];
    for (int j = 0; j < N; ++j) {
      const float* at = block.keys[vector + j] + d * block.key_stride;
      key[j] = load(at);
      if (Q <= 4) prefetch(at + kAheadRows * block.key_stride);
    }
    for (int i = 0; i < Q; ++i) {
      V value = splat(q[i * columns + d]);
      for (int j = 0; j < N; ++j) sum[i][j] = fma(value, key[j], sum[i][j]);
    }
  }
  for (int i = 0; i < Q; ++i) {
    for (int j = 0; j < N; ++j) out[i][vector + j] = mul(sum[i][j], splat(call.scale));
  }
}

// Softmax numerators of the block's first `count` slots, and by how much to scale what was
// summed before.
template <int Q>
void weigh(const AttentionCall& call, const Block& block, const Run& run, int count) {
  V score[Q][kBlockVectors];
  const int vectors = (count + kLanes - 1) / kLanes;
  if (vectors == kBlockVectors) {
    scores<Q, kBlockVectors>(call, block, run.q, 0, score);
  } else {
    for (int j = 0; j < vectors; ++j) scores<Q, 1>(call, block, run.q, j, score);
  }
  for (int i = 0; i < Q; ++i) {
    const State state = state_at(run.states, i, call.width);
    V peaks = splat(-INFINITY);
    for (int j = 0; j < kBlockVectors; ++j) {
      const int lanes = count - j * kLanes;
      if (lanes <= 0) score[i][j] = splat(-INFINITY);
      else if (lanes < kLanes) score[i][j] = fill_from(score[i][j], lanes, -INFINITY);
      peaks = max(peaks, score[i][j]);
    }
    const float block_peak = max_lanes(peaks), old_peak = state.peak();
    const float peak = block_peak > old_peak ? block_peak : old_peak;
    run.keep[i] = exponential(old_peak - peak);
    V sums[kBlockVectors];
    for (int j = 0; j < kBlockVectors; ++j) {
      sums[j] = exponential(sub(score[i][j], splat(peak)));
      store(run.weights + i * kBlock + j * kLanes, sums[j]);
    }
    const float added = sum_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    state.sum() = state.sum() * run.keep[i] + added;
    state.peak() = peak;
  }
}

// Adds the weighted rows of V to N vectors of columns, from column `at` on.
template <int Q, int N>
void add_values(const AttentionCall& call, const Block& block, const Run& run, int count,
                long at) {
  const int lanes = lanes_at(at + (N - 1) * kLanes, call.pages.head_dim);
  V sum[Q][N];
  for (int i = 0; i < Q; ++i) {
    const float* values = state_at(run.states, i, call.width).values() + at;
    for (int j = 0; j < N; ++j) sum[i][j] = mul(load(values + j * kLanes), splat(run.keep[i]));
  }
  for (int slot = 0; slot < count; ++slot) {
    V value[N];
    const float* from = block.values[slot] + at;
    for (int j = 0; j < N; ++j) {
      value[j] = N > 1 ? load(from + j * kLanes) : load_some(from, lanes);
    }
    for (int i = 0; i < Q; ++i) {
      V weight = splat(run.weights[i * kBlock + slot]);
      for (int j = 0; j < N; ++j) sum[i][j] = fma(weight, value[j], sum[i][j]);
    }
  }
  for (int i = 0; i < Q; ++i) {
    float* values = state_at(run.states, i, call.width).values() + at;
    for (int j = 0; j < N; ++j) store(values + j * kLanes, sum[i][j]);
  }
}

template <int Q>
void take(const AttentionCall& call, const Block& block, const Run& run, int count, int vectors,
          long at) {
  if (vectors == 0) weigh<Q>(call, block, run, count);
  else if (vectors == 1) add_values<Q, 1>(call, block, run, count, at);
  else if (vectors == 2) add_values<Q, 2>(call, block, run, count, at);
  else if (vectors == 4) add_values<Q, 4>(call, block, run, count, at);
  else add_values<Q, (Q <= 2 ? 8 : 4)>(call, block, run, count, at);
}

void take_run(const AttentionCall& call, const Block& block, const Run& run, int count,
              int vectors, long at) {
  switch (run.count) {
#if PM_LEVEL == 2
    case 2: return take<2>(call, block, run, count, vectors, at);
    case 3: return take<3>(call, block, run, count, vectors, at);
    case 4: return take<4>(call, block, run, count, vectors, at);
    case 5: return take<5>(call, block, run, count, vectors, at);
    case 6: return take<6>(call, block, run, count, vectors, at);
#endif
    default: return take<1>(call, block, run, count, vectors, at);
  }
}

// Takes slots [0, count) of a block into the states of all runs: first K for everyone, then V a
// strip of columns at a time, so that what is shared stays in the nearest cache.
void take_block(const AttentionCall& call, const Block& block, const Run* runs, int run_count,
                int count) {
  for (int i = 0; i < run_count; ++i) take_run(call, block, runs[i], count, 0, 0);
  const long columns = call.pages.head_dim;
  const int widest = PM_LEVEL == 2 && run_count == 1 && runs[0].count <= 2 ? 8 : 4;
  for (long at = 0; at < columns;) {
    const long left = (columns - at) / kLanes;
    const int vectors = left >= widest ? widest : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    for (int i = 0; i < run_count; ++i) take_run(call, block, runs[i], count, vectors, at);
    at += vectors * kLanes;
  }
}

}  // namespace
