// Draws a column of a row from the softmax of its values. A row's result depends on nothing but the
// row, its temperature and its uniform: every sum has a fixed order.
#pragma once

#include <math.h>

#include "sums.h"

namespace {

constexpr long kDrawWork = 2;  // cost of an element relative to other row operations (kRowWork)

inline long sum_blocks(long width) { return (width + PM_SUM_BLOCK - 1) / PM_SUM_BLOCK; }

inline V weigh(V value, V peak, V heat) { return exponential(mul(sub(value, peak), heat)); }

inline void weigh(const float* in, long count, float peak, float temperature, float* to) {
  const V top = splat(peak), heat = splat(1.0f / temperature);
  for (long i = 0; i < count; i += kLanes) {
    const int lanes = lanes_at(i, count);
    store_some(to + i, weigh(load_some(in + i, lanes), top, heat), lanes);
  }
}

struct Distribution {
  const float* in;
  long width;
  float peak, temperature;

  long weigh_block(long block, float* to) const {
    const long first = block * PM_SUM_BLOCK;
    const long count = width - first < PM_SUM_BLOCK ? width - first : PM_SUM_BLOCK;
    weigh(in + first, count, peak, temperature, to);
    return count;
  }

  double whole() const {
    float weights[PM_SUM_BLOCK];
    double sum = 0.0;
    for (long block = 0; block < sum_blocks(width); ++block) {
      sum += sum_of(weights, weigh_block(block, weights));
    }
    return sum;
  }
};

// Finds the column to draw: its block by the blocks' sums, its place by a running sum within the
// block. A `block` of -1: the sum is not finite.
struct Aim {
  double target, running;
  long block;

  Aim(const double* sums, long blocks, double uniform) : running(0.0), block(0) {
    double whole = 0.0;
    for (long at = 0; at < blocks; ++at) whole += sums[at];
    // The limit is for a uniform of 1: below 1, the product never rounds up to the whole sum.
    target = fmin(uniform * whole, nextafter(whole, 0.0));
    if (!(whole < INFINITY)) block = -1;
    while (block >= 0 && running + sums[block] <= target) running += sums[block++];
  }

  long place(const float* weights, long count) const {
    double sum = running;
    long found = 0;  // or the last with a weight: the two ways to sum may round differently
    for (long i = 0; i < count; ++i) {
      if (weights[i] > 0.0f) found = i;
      sum += static_cast<double>(weights[i]);
      if (sum > target) break;
    }
    return found;
  }
};

// Draws without limits. `weights`: [width], or null; `sums`: [blocks].
inline long draw_free(const float* in, long width, float temperature, double uniform,
                      float* weights, double* sums) {
  const Distribution row = {in, width, highest_of(in, width), temperature};
  const long blocks = sum_blocks(row.width);
  float scratch[PM_SUM_BLOCK];
  for (long block = 0; block < blocks; ++block) {
    float* to = weights ? weights + block * PM_SUM_BLOCK : scratch;
    sums[block] = sum_of(to, row.weigh_block(block, to));
  }
  const Aim aim(sums, blocks, uniform);
  if (aim.block < 0) return 0;
  const long count = row.weigh_block(aim.block, scratch);
  return aim.block * PM_SUM_BLOCK + aim.place(scratch, count);
}

}  // namespace
