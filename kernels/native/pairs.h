// Products of bfloat16s, two at a time. Where the machine has an instruction for that (vdpbf16ps),
// rows and weights are pairs, 32 bits per lane, with the earlier value of K in the upper half,
// because the instruction multiplies and adds the upper halves first. The product of two bfloat16s
// is exact in float32, so an element's sum is the same chain of multiply-adds as everywhere else,
// to the same bits; but numbers below 2^-126 count as 0 here.
#pragma once

#include "weights.h"

namespace {

// Calls body(T{}) with the type of a weight whose rows are rounded.
template <typename Body>
inline auto with_bfloat_type(long type, Body body) {
  return type == PM_WEIGHT_INT8 ? body(Int8{}) : body(Bfloat16{});
}

// How rows are multiplied by weights: `kStep` values of K at a time, which are one lane of a row.
struct Floats {
  static constexpr long kStep = 1;
  template <typename T, int COUNT>
  static V weights(const typename T::Code* codes) {
    return T::decode(codes);
  }
  static V add_product(V row, V weights, V sum) { return fma(row, weights, sum); }
  template <typename Body>
  static auto with_type(long type, Body body) {
    return with_weight_type(type, body);
  }
};

// Rounds to bfloat16; the result as a float32.
inline float rounded_to_bfloat(float x) {
  return Bfloat16::decode_one(Bfloat16::encode_one(x));
}

inline void round_row(const float* x, float* to, long k) {
  for (long i = 0; i < k; ++i) to[i] = rounded_to_bfloat(x[i]);
}

#if PM_LEVEL >= 3

inline V lanes_of(__m512i bits) { return {_mm512_castsi512_ps(bits)}; }

// Pairs of the 16 columns' weights at COUNT values of K, 1 or 2; if 1, the second of a pair is 0.
template <int COUNT>
inline V weight_pairs(const uint16_t* codes) {
  const __m512i from = _mm512_set_epi16(15, 31, 14, 30, 13, 29, 12, 28, 11, 27, 10, 26, 9, 25, 8,
                                        24, 7, 23, 6, 22, 5, 21, 4, 20, 3, 19, 2, 18, 1, 17, 0,
                                        16);
  const __m512i both = COUNT == 2 ? _mm512_loadu_si512(codes)
                                  : _mm512_zextsi256_si512(load_16_bits(codes));
  return lanes_of(_mm512_permutexvar_epi16(from, both));
}

template <int COUNT>
inline V weight_pairs(const int8_t* codes) {
  const __m512i first = _mm512_castps_si512(Int8::decode(codes).v);
  if (COUNT == 1) return lanes_of(first);
  const __m512i second = _mm512_castps_si512(Int8::decode(codes + kLanes).v);
  return lanes_of(_mm512_mask_blend_epi16(0x55555555, first, _mm512_srli_epi32(second, 16)));
}

struct BfloatPairs {
  static constexpr long kStep = 2;
  template <typename T, int COUNT>
  static V weights(const typename T::Code* codes) {
    return weight_pairs<COUNT>(codes);
  }
  static V add_product(V row, V weights, V sum) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)row.v, (__m512bh)weights.v)};
  }
  template <typename Body>
  static auto with_type(long type, Body body) {
    return with_bfloat_type(type, body);
  }
};

inline void pair_row(const float* x, float* to, long k) {
  constexpr long kWidth = 2 * kLanes;
  for (long i = 0; i < k; i += kWidth) {
    const int left = static_cast<int>(k - i < kWidth ? k - i : kWidth);
    const V low = load_some(x + i, left < kLanes ? left : kLanes);
    const V high = left > kLanes ? load_some(x + i + kLanes, left - kLanes) : zero();
    const __m512i words = (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v);
    store_some(to + i / 2, lanes_of(_mm512_rol_epi32(words, 16)), (left + 1) / 2);
  }
}

#endif

}  // namespace
