// Soft caps of scores, and masks for scores before a window.
#pragma once

#include "kernels.h"

namespace {

// cap * tanh(x / cap), to a few ulp of float32: by tanh(y) = 1 - 2 / (e^2y + 1), and for |y| < 1/4,
// where that difference would cancel, by the first terms of the Taylor series.
inline V capped(V x, float cap) {
  constexpr float kSmall = 0.25f;
  const V y = mul(x, splat(1.0f / cap)), magnitude = max(y, sub(zero(), y));
  const V small = min(splat(kSmall), max(splat(-kSmall), y)), square = mul(small, small);
  V series = splat(62.0f / 2835.0f);
  series = fma(series, square, splat(-17.0f / 315.0f));
  series = fma(series, square, splat(2.0f / 15.0f));
  series = fma(series, square, splat(-1.0f / 3.0f));
  series = fma(mul(series, square), small, small);
  const V grown = add(exponential(add(y, y)), splat(1.0f));
  const V whole = sub(splat(1.0f), divide(splat(2.0f), grown));
  return mul(splat(cap), add(series, zero_below(sub(whole, series), magnitude, kSmall)));
}

// Lanes below n become `fill`.
inline V fill_below(V x, int n, float fill) {
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < n && i < kLanes; ++i) lanes[i] = fill;
  return load(lanes);
}

}  // namespace
