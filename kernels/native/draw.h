// Draws a column of a row by the softmax of what is in it. A row's result depends on nothing but
// the row, its temperature and its uniform: every sum is taken in an order of its own.
#pragma once

#include <math.h>

namespace {

constexpr long kDrawWork = 2;  // what an element costs, by those of other rows (see kRowWork)

// Numbers only: what is none may be lost, and comes back as a weight that is none.
inline float highest_of(const float* in, long width) {
  V peaks[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
  long i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    for (int part = 0; part < 4; ++part) {
      peaks[part] = max(load(in + i + part * kLanes), peaks[part]);
    }
  }
  for (; i < width; i += kLanes) {
    const int lanes = lanes_at(i, width);
    peaks[0] = max(fill_from(load_some(in + i, lanes), lanes, -INFINITY), peaks[0]);
  }
  return max_lanes(max(max(peaks[0], peaks[1]), max(peaks[2], peaks[3])));
}

inline void weigh(const float* in, long count, float peak, float temperature, float* to) {
  const V top = splat(peak), heat = splat(1.0f / temperature);
  for (long i = 0; i < count; i += kLanes) {
    const int lanes = lanes_at(i, count);
    V scaled = mul(sub(load_some(in + i, lanes), top), heat);
    store_some(to + i, exponential(scaled), lanes);
  }
}

inline double sum_of(const float* in, long count) {
  double sums[kLanes] = {};
  long i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += static_cast<double>(in[i + lane]);
  }
  for (int lane = 0; i + lane < count; ++lane) sums[lane] += static_cast<double>(in[i + lane]);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  }
  return sums[0];
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
};

// Sums of blocks find the block, a running sum within it finds the column.
inline long invert(const Distribution& row, const double* sums, double uniform) {
  const long blocks = (row.width + PM_SUM_BLOCK - 1) / PM_SUM_BLOCK;
  double whole = 0.0;
  for (long block = 0; block < blocks; ++block) whole += sums[block];
  if (!(whole < INFINITY)) return 0;
  // A uniform just below 1 may round up to the whole sum.
  const double target = fmin(uniform * whole, nextafter(whole, 0.0));
  long block = 0;
  double running = 0.0;
  while (running + sums[block] <= target) running += sums[block++];
  float weights[PM_SUM_BLOCK];
  const long count = row.weigh_block(block, weights);
  long found = 0;  // the last that weighs anything, should the two ways to sum round differently
  for (long i = 0; i < count; ++i) {
    if (weights[i] > 0.0f) found = i;
    running += static_cast<double>(weights[i]);
    if (running > target) break;
  }
  return block * PM_SUM_BLOCK + found;
}

long softmax_draw(const float* x, long x_stride, long x_rows, const int64_t* rows,
                  const float* temperatures, const double* uniforms, long count, long width,
                  float* weights, double* sums, int64_t* tokens, int threads) {
  for (long i = 0; i < count; ++i) {
    if (rows[i] < 0 || rows[i] >= x_rows) return 1 + i;
  }
  const long blocks = (width + PM_SUM_BLOCK - 1) / PM_SUM_BLOCK;
  for_rows(count, width * kDrawWork, threads, [=](long i) {
    const float* in = x + rows[i] * x_stride;
    const Distribution row = {in, width, highest_of(in, width), temperatures[i]};
    double* own = sums + i * blocks;
    float scratch[PM_SUM_BLOCK];
    for (long block = 0; block < blocks; ++block) {
      float* to = weights ? weights + i * width + block * PM_SUM_BLOCK : scratch;
      own[block] = sum_of(to, row.weigh_block(block, to));
    }
    tokens[i] = invert(row, own, uniforms[i]);
  });
  return 0;
}

}  // namespace
