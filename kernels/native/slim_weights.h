// Reading panels of slim bfloat16 weights (slim_layout.h).
#pragma once

#include <array>

#include "pairs.h"
#include "slim_layout.h"

namespace {

// In a pair of bfloat16s, the bits of the first, which is a float32 once the others are zero.
constexpr int kFirstOfPair = static_cast<int>(0xffff0000u);

// The sixteen upper bytes of a panel, as they are looked up by code.
#if PM_LEVEL >= 2
using Uppers = __m512i;
inline Uppers uppers_of(const uint8_t* bytes) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}

// Decodes four values of K, the first (HALF 0) or the last (HALF 1) of a group, to two vectors of
// pairs.
template <int HALF>
inline void decode_slim_pairs(const uint8_t* group, Uppers uppers, __m512i* to) {
  const __m512i lower = _mm512_loadu_si512(group + kLineBytes * HALF);
  __m512i codes = _mm512_loadu_si512(group + pm::kSlimCodesAt);
  if (HALF) codes = _mm512_srli_epi16(codes, 4);
  const __m512i upper =
      _mm512_shuffle_epi8(uppers, _mm512_and_si512(codes, _mm512_set1_epi8(15)));
  to[0] = _mm512_unpacklo_epi8(lower, upper);
  to[1] = _mm512_unpackhi_epi8(lower, upper);
}

// The same, to four vectors of floats.
template <int HALF>
inline void decode_slim(const uint8_t* group, Uppers uppers, V* to) {
  const __m512i first_mask = _mm512_set1_epi32(kFirstOfPair);
  __m512i pairs[2];
  decode_slim_pairs<HALF>(group, uppers, pairs);
  for (int i = 0; i < 2; ++i) {
    to[2 * i] = {_mm512_castsi512_ps(_mm512_and_si512(pairs[i], first_mask))};
    to[2 * i + 1] = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs[i], 16))};
  }
}
#elif PM_LEVEL == 1
using Uppers = __m256i;
inline Uppers uppers_of(const uint8_t* bytes) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}

inline __m256i load_32_bytes(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

// Decodes four values of K, the first (HALF 0) or the last (HALF 1) of a group, of eight columns.
template <int HALF>
inline void decode_slim(const uint8_t* lowers, const uint8_t* group_codes, Uppers uppers,
                        __m256* to) {
  const __m256i lower = load_32_bytes(lowers);
  __m256i codes = load_32_bytes(group_codes);
  if (HALF) codes = _mm256_srli_epi16(codes, 4);
  const __m256i upper =
      _mm256_shuffle_epi8(uppers, _mm256_and_si256(codes, _mm256_set1_epi8(15)));
  const __m256i first = _mm256_unpacklo_epi8(lower, upper);
  const __m256i last = _mm256_unpackhi_epi8(lower, upper);
  const __m256i first_mask = _mm256_set1_epi32(kFirstOfPair);
  to[0] = _mm256_castsi256_ps(_mm256_and_si256(first, first_mask));
  to[1] = _mm256_castsi256_ps(_mm256_slli_epi32(first, 16));
  to[2] = _mm256_castsi256_ps(_mm256_and_si256(last, first_mask));
  to[3] = _mm256_castsi256_ps(_mm256_slli_epi32(last, 16));
}

template <int HALF>
inline void decode_slim(const uint8_t* group, Uppers uppers, V* to) {
  const uint8_t* lowers = group + kLineBytes * HALF;
  const uint8_t* codes = group + pm::kSlimCodesAt;
  __m256 left[4], right[4];
  decode_slim<HALF>(lowers, codes, uppers, left);
  decode_slim<HALF>(lowers + 32, codes + 32, uppers, right);
  for (int i = 0; i < 4; ++i) to[i] = {left[i], right[i]};
}
#else
using Uppers = const uint8_t*;
inline Uppers uppers_of(const uint8_t* bytes) { return bytes; }

// Decodes four values of K, the first (HALF 0) or the last (HALF 1) of a group.
template <int HALF>
inline void decode_slim(const uint8_t* group, Uppers uppers, V* to) {
  const uint8_t* lowers = group + kLineBytes * HALF;
  const uint8_t* codes = group + pm::kSlimCodesAt;
  float values[4][kLanes];
  for (int i = 0; i < 4; ++i) {
    for (int column = 0; column < kLanes; ++column) {
      const long at = pm::slim_place(i, column);
      const uint32_t upper = uppers[codes[at] >> 4 * HALF & 15];
      values[i][column] = float_of(upper << 24 | static_cast<uint32_t>(lowers[at]) << 16);
    }
  }
  for (int i = 0; i < 4; ++i) to[i] = load(values[i]);
}
#endif

// Decodes four values of K in the form in which M multiplies them (pairs.h).
template <typename M, int HALF>
inline void decode_slim_as(const uint8_t* group, Uppers uppers, V* to) {
#if PM_LEVEL >= 3
  if constexpr (M::kStep == 2) {
    __m512i pairs[2];
    decode_slim_pairs<HALF>(group, uppers, pairs);
    to[0] = lanes_of(pairs[0]);
    to[1] = lanes_of(pairs[1]);
  } else {
    decode_slim<HALF>(group, uppers, to);
  }
#else
  decode_slim<HALF>(group, uppers, to);
#endif
}

// Reads a panel from `begin` on, a value of K that is the first of a group.
template <typename M>
class SlimPanel {
 public:
  static constexpr int kVectors = 4 / M::kStep;  // of four values of K

  SlimPanel(const Weights& weights, long panel, long begin) {
    const char* at = weights.panel(panel);
    const auto* head = reinterpret_cast<const pm::SlimHead*>(at);
    group_ = reinterpret_cast<const uint8_t*>(at) + pm::slim_groups_at(weights.k) +
             begin / pm::kSlimDepth * pm::kSlimGroupBytes;
    uppers_ = uppers_of(head->uppers);
    stray_ = reinterpret_cast<const pm::SlimStray*>(head + 1);
    const long room = pm::slim_strays_max(weights.k);
    last_ = stray_ + (head->stray_count < room ? head->stray_count : room);
    first_ = static_cast<uint32_t>(begin * kLanes);
    while (stray_ < last_ && stray_->at < first_) ++stray_;
    due_ = stray_ < last_ ? stray_->at : kNever;
  }

  // Decodes the next four values of K; HALF is 0 and 1 in turn.
  template <int HALF>
  void take(V* to) {
    decode_slim_as<M, HALF>(group_, uppers_, to);
    if (HALF) group_ += pm::kSlimGroupBytes;
    const uint32_t end = first_ + 4 * kLanes;
    if (__builtin_expect(due_ < end, 0)) {
      float values[kVectors * kLanes];
      for (int i = 0; i < kVectors; ++i) store(values + i * kLanes, to[i]);
      put_strays(values, end);
      for (int i = 0; i < kVectors; ++i) to[i] = load(values + i * kLanes);
    }
    first_ = end;
  }

 private:
  static constexpr uint32_t kNever = UINT32_MAX;

  const uint8_t* group_;
  Uppers uppers_;
  const pm::SlimStray* stray_;
  const pm::SlimStray* last_;
  uint32_t first_, due_;  // positions as in SlimStray::at

  __attribute__((noinline)) void put_strays(float* values, uint32_t end) {
    for (; stray_ < last_ && stray_->at < end; ++stray_) {
      const uint32_t place = stray_->at - first_;  // anywhere if the list is damaged
      if (place < 4 * kLanes) put_stray(values, place, stray_->bits);
    }
    due_ = stray_ < last_ ? stray_->at : kNever;
  }

  static void put_stray(float* values, uint32_t place, uint32_t bits) {
    if constexpr (M::kStep == 1) {
      values[place] = float_of(bits);
      return;
    }
    const uint32_t row = place / kLanes, lane = row / 2 * kLanes + place % kLanes;
    uint16_t halves[2];
    memcpy(halves, values + lane, sizeof halves);
    halves[1 - row % 2] = static_cast<uint16_t>(bits >> 16);
    memcpy(values + lane, halves, sizeof halves);
  }
};

// Readers of P panels from `panel` on, `apart` panels apart.
template <typename M, int P>
inline std::array<SlimPanel<M>, P> slim_panels(const Weights& weights, long panel, long apart) {
  using Panel = SlimPanel<M>;
  if constexpr (P == 1) return {Panel(weights, panel, 0)};
  else return {Panel(weights, panel, 0), Panel(weights, panel + apart, 0)};
}

}  // namespace
