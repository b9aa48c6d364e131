// The maximum, the minimum and the sum of a list of floats, in an order that depends only on its
// length.
#pragma once

#include <math.h>

namespace {

// NaNs may be lost.
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

inline float lowest_of(const float* in, long width) {
  V low = splat(INFINITY);
  for (long i = 0; i < width; i += kLanes) {
    const int lanes = lanes_at(i, width);
    low = min(fill_from(load_some(in + i, lanes), lanes, INFINITY), low);
  }
  return 0.0f - max_lanes(sub(zero(), low));  // a zero comes out as +0
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

}  // namespace
