// The element types of K and V in pages: one struct per type, which decodes sixteen codes to floats
// and encodes floats to codes.
//
// float32 holds values as they are; float16 and bfloat16 round them to nearest, ties to even. int8
// and e4m3 hold a head's K or V of one slot as codes and one float32 scale: value = code * scale,
// where scale = the largest magnitude / kLargest. A row that holds an infinity or a NaN gets a
// scale of NaN and codes of zero.
#pragma once

#include <math.h>
#include <string.h>

#include "pagemesh_native.h"
#include "vec.h"

namespace {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint32_t pick(bool yes, uint32_t a, uint32_t b) { return yes ? a : b; }

// Rounds |x|, given as bits, to `dropped` fewer bits of mantissa, ties to even, and rebases its
// exponent: `rebase` is the difference of the biases, at the place of the narrow type's exponent.
// For magnitudes that the narrow type holds as normal numbers.
inline uint32_t rounded_bits(uint32_t magnitude, int dropped, uint32_t rebase) {
  const uint32_t odd = (magnitude >> dropped) & 1;
  return ((magnitude + ((1u << (dropped - 1)) - 1) + odd) >> dropped) - rebase;
}

// Rounds a magnitude to whole multiples of 2^(exponent - 23): for a type's subnormal numbers.
inline uint32_t rounded_units(uint32_t magnitude, int exponent) {
  const float one = float_of(static_cast<uint32_t>(127 + exponent) << 23);
  return bits_of(float_of(magnitude) + one) - bits_of(one);
}

struct Float32 {
  using Code = float;
  static constexpr bool kScaled = false;
  static constexpr float kLargest = 0.0f, kUnit = 1.0f;
  static V decode(const float* p) { return load(p); }
  static V decode_some(const float* p, int n) { return load_some(p, n); }
  static float decode_one(float code) { return code; }
  static float encode_one(float x) { return x; }
};

struct Float16 {
  using Code = uint16_t;
  static constexpr bool kScaled = false;
  static constexpr float kLargest = 0.0f, kUnit = 1.0f;
  static float decode_one(uint16_t code) {
    const uint32_t sign = (code & 0x8000u) << 16, rest = (code & 0x7fffu) << 13;
    const uint32_t finite = bits_of(float_of(rest) * 0x1p112f);
    return float_of(sign | pick(rest >= 0x0f800000u, rest | 0x7f800000u, finite));
  }
  static uint16_t encode_one(float x) {
    const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu;
    uint32_t code = pick(magnitude < 0x38800000u, rounded_units(magnitude, -1),
                         rounded_bits(magnitude, 13, 112u << 10));
    code = pick(magnitude >= 0x47800000u, 0x7c00u, code);
    code = pick(magnitude > 0x7f800000u, 0x7e00u, code);
    return static_cast<uint16_t>(bits >> 16 & 0x8000u) | static_cast<uint16_t>(code);
  }
  static V decode(const uint16_t* p);
  static V decode_some(const uint16_t* p, int n);
};

struct Bfloat16 {
  using Code = uint16_t;
  static constexpr bool kScaled = false;
  static constexpr float kLargest = 0.0f, kUnit = 1.0f;
  static float decode_one(uint16_t code) { return float_of(static_cast<uint32_t>(code) << 16); }
  static uint16_t encode_one(float x) {
    const uint32_t bits = bits_of(x);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return static_cast<uint16_t>(pick(nan, bits >> 16 | 0x40u, rounded_bits(bits, 16, 0)));
  }
  static V decode(const uint16_t* p);
  static V decode_some(const uint16_t* p, int n);
};

struct Int8 {
  using Code = int8_t;
  static constexpr bool kScaled = true;
  static constexpr float kLargest = 127.0f, kUnit = 1.0f;
  static float decode_one(int8_t code) { return static_cast<float>(code); }
  static int8_t encode_one(float x) {  // |x| <= 127
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    return static_cast<int8_t>(static_cast<int32_t>((x + magic) - magic));
  }
  static V decode(const int8_t* p);
  static V decode_some(const int8_t* p, int n);
};

// Four bits of exponent, three of mantissa, no infinity (OCP E4M3). decode() reads the bits as a
// half float, whose exponent bias is larger by 8, and so lacks a factor of 2^8; the scales include
// it (kUnit).
struct E4m3 {
  using Code = uint8_t;
  static constexpr bool kScaled = true;
  static constexpr float kLargest = 448.0f, kUnit = 256.0f;
  static float decode_one(uint8_t code) {
    const uint32_t sign = (code & 0x80u) << 24, rest = (code & 0x7fu) << 20;
    return float_of(sign | bits_of(float_of(rest) * 0x1p120f));
  }
  static uint8_t encode_one(float x) {  // |x| <= 448
    const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu;
    const uint32_t code = pick(magnitude < 0x3c800000u, rounded_units(magnitude, 14),
                               rounded_bits(magnitude, 20, 120u << 3));
    return static_cast<uint8_t>((bits >> 24 & 0x80u) | code);
  }
  static V decode(const uint8_t* p);
  static V decode_some(const uint8_t* p, int n);
};

#if PM_LEVEL >= 2

inline __m256i load_16_bits(const uint16_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline __m128i load_8_bits(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
inline V from_half(__m256i codes) { return {_mm512_cvtph_ps(codes)}; }
inline V from_bfloat(__m256i codes) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(codes), 16))};
}
inline V from_int8(__m128i codes) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))}; }
inline V from_e4m3(__m128i codes) {
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
  return from_half(_mm256_and_si256(wide, _mm256_set1_epi16(static_cast<short>(0xbf80))));
}

inline V Float16::decode(const uint16_t* p) { return from_half(load_16_bits(p)); }
inline V Float16::decode_some(const uint16_t* p, int n) {
  return from_half(_mm256_maskz_loadu_epi16(lanes_below(n), p));
}
inline V Bfloat16::decode(const uint16_t* p) { return from_bfloat(load_16_bits(p)); }
inline V Bfloat16::decode_some(const uint16_t* p, int n) {
  return from_bfloat(_mm256_maskz_loadu_epi16(lanes_below(n), p));
}
inline V Int8::decode(const int8_t* p) { return from_int8(load_8_bits(p)); }
inline V Int8::decode_some(const int8_t* p, int n) {
  return from_int8(_mm_maskz_loadu_epi8(lanes_below(n), p));
}
inline V E4m3::decode(const uint8_t* p) { return from_e4m3(load_8_bits(p)); }
inline V E4m3::decode_some(const uint8_t* p, int n) {
  return from_e4m3(_mm_maskz_loadu_epi8(lanes_below(n), p));
}

#else

#if PM_LEVEL == 1

inline __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m128i load_64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline __m256 bfloat_half(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16));
}
inline __m256 int8_half(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_64(p)));
}
inline __m256 e4m3_half(const uint8_t* p) {
  const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(load_64(p)), 7);
  return _mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16(static_cast<short>(0xbf80))));
}

inline V Float16::decode(const uint16_t* p) {
  return {_mm256_cvtph_ps(load_128(p)), _mm256_cvtph_ps(load_128(p + 8))};
}
inline V Bfloat16::decode(const uint16_t* p) { return {bfloat_half(p), bfloat_half(p + 8)}; }
inline V Int8::decode(const int8_t* p) { return {int8_half(p), int8_half(p + 8)}; }
inline V E4m3::decode(const uint8_t* p) { return {e4m3_half(p), e4m3_half(p + 8)}; }

#else

template <typename T>
V decode_lanes(const typename T::Code* p, float unit) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = T::decode_one(p[i]) * unit;
  return load(lanes);
}
inline V Float16::decode(const uint16_t* p) { return decode_lanes<Float16>(p, 1.0f); }
inline V Bfloat16::decode(const uint16_t* p) { return decode_lanes<Bfloat16>(p, 1.0f); }
inline V Int8::decode(const int8_t* p) { return decode_lanes<Int8>(p, 1.0f); }
inline V E4m3::decode(const uint8_t* p) { return decode_lanes<E4m3>(p, 1.0f / kUnit); }

#endif

template <typename T>
V decode_tail(const typename T::Code* p, int n) {
  typename T::Code codes[kLanes] = {};
  memcpy(codes, p, sizeof codes[0] * static_cast<size_t>(n));
  return T::decode(codes);
}
inline V Float16::decode_some(const uint16_t* p, int n) { return decode_tail<Float16>(p, n); }
inline V Bfloat16::decode_some(const uint16_t* p, int n) { return decode_tail<Bfloat16>(p, n); }
inline V Int8::decode_some(const int8_t* p, int n) { return decode_tail<Int8>(p, n); }
inline V E4m3::decode_some(const uint8_t* p, int n) { return decode_tail<E4m3>(p, n); }

#endif

// A head's K in a page; its V lies value_offset codes further on.
template <typename T>
inline typename T::Code* head_of(const PmPages& pages, int64_t page, long head) {
  return static_cast<typename T::Code*>(pages.base) + page * pages.page_stride +
         head * pages.head_stride;
}

// The scales of K or of V, one per slot, which follow their codes.
inline float* scales_of(const PmPages& pages, void* codes) {
  return reinterpret_cast<float*>(static_cast<uint8_t*>(codes) + pages.scale_offset_bytes);
}

// Calls body(T{}) with the element type of a pool's K and V.
template <typename Body>
inline auto with_kv_type(const PmPages& pages, Body body) {
  switch (pages.kv_type) {
    case PM_KV_FLOAT16: return body(Float16{});
    case PM_KV_BFLOAT16: return body(Bfloat16{});
    case PM_KV_INT8: return body(Int8{});
    case PM_KV_E4M3: return body(E4m3{});
    default: return body(Float32{});
  }
}

}  // namespace
