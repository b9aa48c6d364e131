// Selects the highest of some values, by their number or their sum, without sorting them: the
// values around the edge of the selection are split at a pivot until only equals are left. Each
// pass halves the range of float bits, so that there are at most 31 passes, over ever fewer values.
#pragma once

#include <math.h>

#include "sums.h"

namespace {

inline unsigned first_lanes(int count) { return (1u << count) - 1; }

// Writes values of at least `pivot` to `high` and the others to `low`, in order; returns how many
// are high. Either may be `in` itself; both have room for kLanes more.
inline long split(const float* in, long count, float pivot, float* high, float* low) {
  long highs = 0, lows = 0;
  for (long i = 0; i < count; i += kLanes) {
    const int lanes = lanes_at(i, count);
    const V value = load_some(in + i, lanes);
    const unsigned up = at_least(value, pivot) & first_lanes(lanes);
    highs += pack(high + highs, value, up);
    lows += pack(low + lows, value, first_lanes(lanes) & ~up);
  }
  return highs;
}

// The edge of a selection: it keeps values above `lowest`, and the first `level` of the `equals`
// values that equal `lowest`.
struct Edge {
  float lowest;
  long level, equals;
};

// A value above `bottom` and at most `top`, halfway between their bits. Neither is below 0.
inline float between(float bottom, float top) {
  uint32_t a, b;
  memcpy(&a, &bottom, sizeof a);
  memcpy(&b, &top, sizeof b);
  a += (b - a + 1) / 2;
  memcpy(&bottom, &a, sizeof a);
  return bottom;
}

// How many of `equals` values, all of them `each`, have a sum of less than `target` before them; at
// least one. `above` is the sum before the first.
inline long level_of(double above, double each, double target, long equals) {
  const double guess = (target - above) / each;
  long level = guess < static_cast<double>(equals) ? static_cast<long>(fmax(guess, 1.0)) : equals;
  while (level > 1 && !(above + static_cast<double>(level - 1) * each < target)) --level;
  while (level < equals && above + static_cast<double>(level) * each < target) ++level;
  return level;
}

// The edge of the selection that takes, from the highest down, the values before which there is
// less than `target`: their sum if kValues, else their number. `values` has at least one, and none
// below 0. `high` and `low` have room for kLanes more than `count`.
template <bool kValues>
inline Edge edge_of(const float* values, long count, double target, float* high, float* low) {
  float bottom = lowest_of(values, count), top = highest_of(values, count);
  double above = 0.0;
  while (bottom < top) {
    const long highs = split(values, count, between(bottom, top), high, low);
    const double more = kValues ? sum_of(high, highs) : static_cast<double>(highs);
    if (above + more >= target) {
      values = high;
      count = highs;
      bottom = lowest_of(high, highs);
    } else {
      above += more;
      values = low;
      count -= highs;
      top = highest_of(low, count);
    }
  }
  const double each = kValues ? static_cast<double>(top) : 1.0;
  return {top, level_of(above, each, target, count), count};
}

// Sets to 0 the values that the edge leaves out.
inline void cut(float* values, long count, const Edge& edge) {
  for (long i = 0; i < count; i += kLanes) {
    const int lanes = lanes_at(i, count);
    const V value = load_some(values + i, lanes);
    store_some(values + i, zero_below(value, value, edge.lowest), lanes);
  }
  if (edge.level == edge.equals) return;
  long left = edge.level;
  for (long i = 0; i < count; ++i) {
    if (values[i] == edge.lowest && left-- <= 0) values[i] = 0.0f;
  }
}

}  // namespace
