// Operations on one row at a time. A row's result depends on nothing but the row.
#pragma once

#include <math.h>

namespace {

constexpr long kRowWork = 1 << 18;  // elements below which one thread is enough (see parallel.h)

template <typename Body>
void for_rows(long rows, long width, int threads, Body body) {
  if (rows * width < kRowWork) threads = 1;
  if (threads > rows) threads = rows > 0 ? static_cast<int>(rows) : 1;
  long step = rows / (threads * 4);
  if (step < 1) step = 1;
  pm::Counter work;
  pm::parallel(threads, [&] {
    long begin, end;
    while (work.take(rows, step, &begin, &end)) {
      for (long row = begin; row < end; ++row) body(row);
    }
  });
}

inline int lanes_at(long at, long width) {
  return width - at < kLanes ? static_cast<int>(width - at) : kLanes;
}

inline void norm_row(const float* in, const float* weight, float* to, long width, float epsilon) {
  V squares = zero();
  for (long i = 0; i < width; i += kLanes) {
    V value = load_some(in + i, lanes_at(i, width));
    squares = fma(value, value, squares);
  }
  const float mean = sum_lanes(squares) / static_cast<float>(width);
  const V scale = splat(1.0f / sqrtf(mean + epsilon));
  for (long i = 0; i < width; i += kLanes) {
    const int lanes = lanes_at(i, width);
    V value = mul(mul(load_some(in + i, lanes), scale), load_some(weight + i, lanes));
    store_some(to + i, value, lanes);
  }
}

void rms_norm(const float* x, long x_stride, const float* weight, float* out, long out_stride,
              long rows, long width, float epsilon, int threads) {
  for_rows(rows, width, threads, [=](long row) {
    norm_row(x + row * x_stride, weight, out + row * out_stride, width, epsilon);
  });
}

// Rotates `heads` heads, which lie one after the other, by the angles of one position, in place.
inline void turn_heads(float* x, long heads, long head_dim, const float* cosine, const float* sine,
                       long half) {
  for (long head = 0; head < heads; ++head) {
    float* low = x + head * head_dim;
    float* high = low + half;
    for (long i = 0; i < half; i += kLanes) {
      const int lanes = lanes_at(i, half);
      V a = load_some(low + i, lanes), b = load_some(high + i, lanes);
      V cc = load_some(cosine + i, lanes), ss = load_some(sine + i, lanes);
      store_some(low + i, sub(mul(a, cc), mul(b, ss)), lanes);
      store_some(high + i, add(mul(b, cc), mul(a, ss)), lanes);
    }
  }
}

void rope(float* x, long row_stride, const float* cosine, const float* sine, long rows, long heads,
          long head_dim, long rotary_dim, int threads) {
  const long half = rotary_dim / 2;
  for_rows(rows, heads * head_dim, threads, [=](long row) {
    turn_heads(x + row * row_stride, heads, head_dim, cosine + row * half, sine + row * half,
               half);
  });
}

inline V gated_by(V gate, V up) {
  const V denominator = add(splat(1.0f), exponential(sub(zero(), gate)));
  return mul(divide(gate, denominator), up);
}

inline void gate_row(const float* gate, const float* up, float* to, long width) {
  for (long i = 0; i < width; i += kLanes) {
    const int lanes = lanes_at(i, width);
    store_some(to + i, gated_by(load_some(gate + i, lanes), load_some(up + i, lanes)), lanes);
  }
}

void silu_mul(const float* gate_up, long in_stride, float* out, long out_stride, long rows,
              long width, int threads) {
  for_rows(rows, width, threads, [=](long row) {
    const float* gate = gate_up + row * in_stride;
    gate_row(gate, gate + width, out + row * out_stride, width);
  });
}

// log(sum(exp(x - peak))) of a row, where `peak` is its highest value. A log-probability is
// (x - peak) - this.
inline float rest_of(const float* in, long width, float peak) {
  V sums = zero();
  for (long i = 0; i < width; i += kLanes) {
    const int lanes = lanes_at(i, width);
    V shifted = sub(load_some(in + i, lanes), splat(peak));
    sums = add(sums, fill_from(exponential(shifted), lanes, 0.0f));
  }
  return logf(sum_lanes(sums));
}

void log_softmax(const float* x, long x_stride, float* out, long out_stride, long rows, long width,
                 int threads) {
  for_rows(rows, width, threads, [=](long row) {
    const float* in = x + row * x_stride;
    float* to = out + row * out_stride;
    V peaks = splat(-INFINITY);
    for (long i = 0; i < width; i += kLanes) {
      const int lanes = lanes_at(i, width);
      peaks = max(peaks, fill_from(load_some(in + i, lanes), lanes, -INFINITY));
    }
    const float peak = max_lanes(peaks);
    // Subtracted one after the other: their sum would be rounded to the precision of the highest.
    const V top = splat(peak), rest = splat(rest_of(in, width, peak));
    for (long i = 0; i < width; i += kLanes) {
      const int lanes = lanes_at(i, width);
      store_some(to + i, sub(sub(load_some(in + i, lanes), top), rest), lanes);
    }
  });
}

}  // namespace
