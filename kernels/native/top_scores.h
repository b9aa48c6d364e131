// The log-softmax of a few columns of a row: of given columns, and of the highest. One pass over
// the row keeps the highest in a heap, whose lowest entry is the one to beat; the next pass sums
// the exponentials of all columns.
#pragma once

#include <math.h>

#include "sums.h"

namespace {

// The highest columns so far; of equals the lowest columns. A value and its column are packed into
// one number, the higher the better, in a heap whose first is the worst. An empty place is 0, less
// than any of them.
class Ranking {
 public:
  // `memory`: `count` words, at least one.
  Ranking(uint64_t* memory, long count) : heap_(memory), count_(count), bound_(-INFINITY) {
    for (long i = 0; i < count; ++i) heap_[i] = 0;
  }

  // Values below it cannot enter the ranking any more; others may or may not.
  float bound() const { return bound_; }

  void see(V values, long first, unsigned lanes) {
    lanes &= at_least(values, bound_);
    if (lanes == 0) return;
    float all[kLanes];
    store(all, values);
    for (; lanes; lanes &= lanes - 1) {
      const int lane = __builtin_ctz(lanes);
      take(number(all[lane], first + lane));
    }
  }

  // Sorts best first; see() must not be called afterwards.
  void sort() {
    for (long left = count_ - 1; left > 0; --left) {
      const uint64_t worst = heap_[0];
      sink(heap_[left], left);
      heap_[left] = worst;
    }
  }

  long column(long place) const { return static_cast<long>(~heap_[place] & 0xffffffffu); }

 private:
  static uint64_t number(float value, long column) {
    value += 0.0f;  // makes both zeros equal
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
    return static_cast<uint64_t>(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(column));
  }

  static float value(uint64_t number) {
    uint32_t bits = static_cast<uint32_t>(number >> 32);
    bits ^= bits >> 31 ? 0x80000000u : 0xffffffffu;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
  }

  void take(uint64_t number) {
    if (number <= heap_[0]) return;
    sink(number, count_);
    // Columns come in ascending order, so a later value that equals the worst is worse.
    bound_ = heap_[0] ? nextafterf(value(heap_[0]), INFINITY) : -INFINITY;
  }

  // Replaces the first of `count` numbers and restores the heap.
  void sink(uint64_t number, long count) {
    long at = 0;
    for (long next = 1; next < count; next = 2 * at + 1) {
      if (next + 1 < count && heap_[next + 1] < heap_[next]) ++next;
      if (number <= heap_[next]) break;
      heap_[at] = heap_[next];
      at = next;
    }
    heap_[at] = number;
  }

  uint64_t* heap_;
  long count_;
  float bound_;
};

// Shows all columns of a row to `ranking` and returns the highest value. NaNs may be lost.
inline float rank(const float* in, long width, Ranking* ranking) {
  V peaks = splat(-INFINITY);
  long i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    const float* four = in + i;
    const V low = max(load(four), load(four + kLanes));
    const V best = max(low, max(load(four + 2 * kLanes), load(four + 3 * kLanes)));
    peaks = max(best, peaks);
    if (at_least(best, ranking->bound()) == 0) continue;
    for (int part = 0; part < 4; ++part) {
      ranking->see(load(four + part * kLanes), i + part * kLanes, first_lanes(kLanes));
    }
  }
  for (; i < width; i += kLanes) {
    const int lanes = lanes_at(i, width);
    const V value = fill_from(load_some(in + i, lanes), lanes, -INFINITY);
    peaks = max(value, peaks);
    ranking->see(value, i, first_lanes(lanes));
  }
  return max_lanes(peaks);
}

inline bool has_no_number(const float* in, long width) {
  for (long i = 0; i < width; ++i) {
    if (in[i] != in[i]) return true;
  }
  return false;
}

inline void score_row(const float* in, long width, const PmScored& scored, long index,
                      uint64_t* memory, float* scores, int64_t* top_columns, float* tops) {
  const long asked = scored.top_counts[index];
  const long count = asked < width ? asked : width;
  Ranking ranking(memory, count);
  const float peak = count > 0 ? rank(in, width, &ranking) : highest_of(in, width);
  const float rest = rest_of(in, width, peak);
  const auto score = [=](float value) { return (value - peak) - rest; };
  for (long i = 0; i < scored.column_count; ++i) {
    scores[i] = score(in[scored.columns[index * scored.column_count + i]]);
  }
  ranking.sort();
  const bool ranked = rest == rest || !has_no_number(in, width);
  for (long i = 0; i < count; ++i) {
    top_columns[i] = ranked ? ranking.column(i) : i;
    tops[i] = score(in[top_columns[i]]);
  }
}

long top_scores(const float* x, long x_stride, long x_rows, long width, const PmScored* scored,
                long top_stride, float* scores, int64_t* top_columns, float* tops, int threads) {
  const PmScored own = *scored;
  for (long i = 0; i < own.count; ++i) {
    if (own.rows[i] < 0 || own.rows[i] >= x_rows) return 1 + i;
    for (long j = 0; j < own.column_count; ++j) {
      const int64_t column = own.columns[i * own.column_count + j];
      if (column < 0 || column >= width) return 1 + i;
    }
  }
  const long heap = top_stride < width ? top_stride : width;
  uint64_t* memory =
      pm::take<uint64_t>(static_cast<size_t>(heap) * static_cast<size_t>(threads));
  for_rows(own.count, width * kDrawWork, threads, [=](long i) {
    score_row(x + own.rows[i] * x_stride, width, own, i, memory + heap * pm::thread_index(),
              scores + i * own.column_count, top_columns + i * top_stride, tops + i * top_stride);
  });
  free(memory);
  return 0;
}

}  // namespace
