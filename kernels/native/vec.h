// A vector of sixteen floats on every level: kernels have one source, which is compiled once per
// level. fma() is fused, except on the portable level, where it rounds twice; on 64-bit ARM that
// level uses NEON and is fused too. So vector results are the same for every shape and thread count
// of one level, but not across levels. max(a, b) and min(a, b) return b where either is NaN.
#pragma once

#include <stdint.h>
#include <string.h>

#if PM_LEVEL > 0
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

constexpr int kLanes = 16;

#if PM_LEVEL >= 2

struct V {
  __m512 v;
};
inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
inline __mmask16 lanes_below(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline V load_some(const float* p, int n) { return {_mm512_maskz_loadu_ps(lanes_below(n), p)}; }
inline void store_some(float* p, V a, int n) { _mm512_mask_storeu_ps(p, lanes_below(n), a.v); }
inline V splat(float x) { return {_mm512_set1_ps(x)}; }
inline V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V sub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V divide(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
inline V min(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
// Lanes from n on become `fill`.
inline V fill_from(V a, int n, float fill) {
  return {_mm512_mask_blend_ps(lanes_below(n), _mm512_set1_ps(fill), a.v)};
}
// a where x >= limit, else 0.
inline V zero_below(V a, V x, float limit) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_GE_OQ), a.v)};
}
// The lanes where a >= limit, as a bit mask; lane 0 is the lowest bit.
inline unsigned at_least(V a, float limit) {
  return _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(limit), _CMP_GE_OQ);
}
// Writes the given lanes of `a` contiguously and returns how many there are. May overwrite up to
// kLanes floats at `to`.
inline long pack(float* to, V a, unsigned lanes) {
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(static_cast<__mmask16>(lanes), a.v));
  return __builtin_popcount(lanes);
}
// The same for the numbers first, first + 1, ...
inline long pack_count(int32_t* to, int32_t first, unsigned lanes) {
  const __m512i counting =
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i all = _mm512_add_epi32(_mm512_set1_epi32(first), counting);
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(static_cast<__mmask16>(lanes), all));
  return __builtin_popcount(lanes);
}
// a * 2^n, where t = 1.5 * 2^23 + n holds the integer n in its low bits.
inline V scale_by_bits(V a, V t) {
  __m512i n = _mm512_slli_epi32(_mm512_castps_si512(t.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), n))};
}
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_far(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

#elif PM_LEVEL == 1

struct V {
  __m256 a, b;
};
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline V load_some(const float* p, int n) {
  if (n == kLanes) return load(p);
  float lanes[kLanes] = {};
  memcpy(lanes, p, sizeof(float) * static_cast<size_t>(n));
  return load(lanes);
}
inline void store_some(float* p, V x, int n) {
  if (n == kLanes) return store(p, x);
  float lanes[kLanes];
  store(lanes, x);
  memcpy(p, lanes, sizeof(float) * static_cast<size_t>(n));
}
inline V splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V sub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V divide(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline V fma(V x, V y, V z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline V min(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline __m256 keep_below(__m256 x, int n, __m256 fill) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i kept = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
  return _mm256_blendv_ps(fill, x, _mm256_castsi256_ps(kept));
}
inline V fill_from(V x, int n, float fill) {
  if (n == kLanes) return x;
  const __m256 other = _mm256_set1_ps(fill);
  return {keep_below(x.a, n, other), keep_below(x.b, n - 8, other)};
}
inline V zero_below(V x, V y, float limit) {
  __m256 bound = _mm256_set1_ps(limit);
  return {_mm256_and_ps(x.a, _mm256_cmp_ps(y.a, bound, _CMP_GE_OQ)),
          _mm256_and_ps(x.b, _mm256_cmp_ps(y.b, bound, _CMP_GE_OQ))};
}
inline unsigned at_least(V x, float limit) {
  __m256 bound = _mm256_set1_ps(limit);
  const int a = _mm256_movemask_ps(_mm256_cmp_ps(x.a, bound, _CMP_GE_OQ));
  const int b = _mm256_movemask_ps(_mm256_cmp_ps(x.b, bound, _CMP_GE_OQ));
  return static_cast<unsigned>(a | b << 8);
}
inline __m256 scale_half(__m256 a, __m256 t) {
  __m256i n = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), n));
}
inline V scale_by_bits(V x, V t) { return {scale_half(x.a, t.a), scale_half(x.b, t.b)}; }
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_far(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

#else

typedef float F4 __attribute__((vector_size(16)));
typedef unsigned U4 __attribute__((vector_size(16)));
struct V {
  F4 q[4];
};
inline F4 splat4(float x) { return F4{x, x, x, x}; }
inline F4 pick4(U4 mask, F4 yes, F4 no) { return (F4)(((U4)yes & mask) | ((U4)no & ~mask)); }
inline F4 max4(F4 a, F4 b) { return pick4((U4)(a > b), a, b); }
#define PM_EACH4(expression)                   \
  V r;                                         \
  for (int i = 0; i < 4; ++i) r.q[i] = (expression); \
  return r
inline V load(const float* p) {
  V r;
  memcpy(&r, p, sizeof r);
  return r;
}
inline void store(float* p, V a) { memcpy(p, &a, sizeof a); }
inline V load_some(const float* p, int n) {
  if (n == kLanes) return load(p);
  float lanes[kLanes] = {};
  memcpy(lanes, p, sizeof(float) * static_cast<size_t>(n));
  return load(lanes);
}
inline void store_some(float* p, V x, int n) {
  if (n == kLanes) return store(p, x);
  memcpy(p, &x, sizeof(float) * static_cast<size_t>(n));
}
inline V splat(float x) { PM_EACH4(splat4(x)); }
inline V add(V a, V b) { PM_EACH4(a.q[i] + b.q[i]); }
inline V sub(V a, V b) { PM_EACH4(a.q[i] - b.q[i]); }
inline V mul(V a, V b) { PM_EACH4(a.q[i] * b.q[i]); }
inline V divide(V a, V b) { PM_EACH4(a.q[i] / b.q[i]); }
#if defined(__aarch64__)
inline V fma(V a, V b, V c) {
  PM_EACH4((F4)vfmaq_f32((float32x4_t)c.q[i], (float32x4_t)a.q[i], (float32x4_t)b.q[i]));
}
#else
inline V fma(V a, V b, V c) { PM_EACH4(a.q[i] * b.q[i] + c.q[i]); }
#endif
inline V max(V a, V b) { PM_EACH4(max4(a.q[i], b.q[i])); }
inline V min(V a, V b) { PM_EACH4(pick4((U4)(a.q[i] < b.q[i]), a.q[i], b.q[i])); }
inline V fill_from(V x, int n, float fill) {
  if (n == kLanes) return x;
  float lanes[kLanes];
  store(lanes, x);
  for (int i = n; i < kLanes; ++i) lanes[i] = fill;
  return load(lanes);
}
inline V zero_below(V a, V x, float limit) {
  PM_EACH4(pick4((U4)(x.q[i] >= splat4(limit)), a.q[i], splat4(0.0f)));
}
inline unsigned at_least(V a, float limit) {
  unsigned lanes = 0;
  for (int i = 0; i < kLanes; ++i) lanes |= static_cast<unsigned>(a.q[i / 4][i % 4] >= limit) << i;
  return lanes;
}
inline V scale_by_bits(V a, V t) { PM_EACH4((F4)((U4)a.q[i] + ((U4)t.q[i] << 23))); }
inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }
#undef PM_EACH4

#endif

#if PM_LEVEL < 2
inline long pack(float* to, V a, unsigned lanes) {
  float all[kLanes];
  store(all, a);
  long count = 0;
  for (; lanes; lanes &= lanes - 1) to[count++] = all[__builtin_ctz(lanes)];
  return count;
}
inline long pack_count(int32_t* to, int32_t first, unsigned lanes) {
  long count = 0;
  for (; lanes; lanes &= lanes - 1) to[count++] = first + __builtin_ctz(lanes);
  return count;
}
#endif

inline V zero() { return splat(0.0f); }

// Sum and maximum over lanes, in an order that is fixed within a level. Below AVX-512, of two lanes
// of which one is NaN, the maximum is the one with the lower index.
#if PM_LEVEL >= 2
inline float sum_lanes(V a) { return _mm512_reduce_add_ps(a.v); }
inline float max_lanes(V a) { return _mm512_reduce_max_ps(a.v); }
#elif PM_LEVEL == 1
inline __m128 low_half(__m256 x) { return _mm256_castps256_ps128(x); }
inline __m128 high_half(__m256 x) { return _mm256_extractf128_ps(x, 1); }
inline float sum_lanes(V x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  const __m128 four = _mm_add_ps(low_half(eight), high_half(eight));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float max_lanes(V x) {
  const __m256 eight = _mm256_max_ps(x.b, x.a);
  const __m128 four = _mm_max_ps(high_half(eight), low_half(eight));
  const __m128 two = _mm_max_ps(_mm_movehl_ps(four, four), four);
  return _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(two), two));
}
#else
inline float sum_lanes(V a) {
  const F4 four = (a.q[0] + a.q[2]) + (a.q[1] + a.q[3]);
  return (four[0] + four[2]) + (four[1] + four[3]);
}
inline float max_lanes(V a) {
  const auto higher = [](float high, float low) { return high > low ? high : low; };
  const F4 four = max4(max4(a.q[3], a.q[1]), max4(a.q[2], a.q[0]));
  return higher(higher(four[3], four[1]), higher(four[2], four[0]));
}
#endif

// e^x to about 1 ulp of float32 between -87.3 and 88; 0 below; NaN for NaN. Range
// reduction by powers of two in two steps (Cody and Waite), then a polynomial of degree 6.
inline V exponential(V x) {
  constexpr float kLow = -87.3f, kHigh = 88.0f;
  const V magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  V bounded = min(max(x, splat(kLow)), splat(kHigh));
  V t = fma(bounded, splat(1.44269504089f), magic);
  V n = sub(t, magic);
  V r = fma(n, splat(-0.693145751953125f), bounded);
  r = fma(n, splat(-1.42860682030941723212e-6f), r);
  V p = splat(1.3981999507e-3f);
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, mul(r, r), add(r, splat(1.0f)));
  // x is always below e^x, so this changes no number. It restores NaNs, which max and min above
  // lost.
  return max(zero_below(scale_by_bits(p, t), x, kLow), x);
}

inline float exponential(float x) {
  V lanes = exponential(splat(x));
#if PM_LEVEL >= 2
  return _mm512_cvtss_f32(lanes.v);
#elif PM_LEVEL == 1
  return _mm256_cvtss_f32(lanes.a);
#else
  return lanes.q[0][0];
#endif
}

}  // namespace
