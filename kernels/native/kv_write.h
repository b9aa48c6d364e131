// Writes new rows of K and V to their pages, head by head.
#pragma once

#include "kv_types.h"
#include "parallel.h"

namespace pm {

namespace {  // compiled once per level, and not to be merged with another level's

constexpr long kHeadDimMax = 512;  // see layout.py

// Encodes one head's K or V of a token; returns the codes' scale (1 for a type that has none).
template <typename T>
inline float encode_row(const float* from, long width, typename T::Code* codes) {
  if (!T::kScaled) {
    for (long i = 0; i < width; ++i) codes[i] = T::encode_one(from[i]);
    return 1.0f;
  }
  uint32_t largest = 0;  // magnitudes order like their bits, infinity and NaN on top
  for (long i = 0; i < width; ++i) {
    const uint32_t magnitude = bits_of(from[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  const bool finite = largest < 0x7f800000u;
  const float scale = finite ? float_of(largest) / T::kLargest : NAN;
  if (!finite || scale == 0.0f) {
    for (long i = 0; i < width; ++i) codes[i] = 0;
    return scale;
  }
  for (long i = 0; i < width; ++i) {
    const float x = from[i] / scale;  // may exceed kLargest: a tiny scale is not exact
    const float below = x < T::kLargest ? x : T::kLargest;
    codes[i] = T::encode_one(below > -T::kLargest ? below : -T::kLargest);
  }
  return scale;
}

template <typename T>
void write_head(const PmPages& pages, const float* k, long k_stride, const float* v,
                long v_stride, const int64_t* slots, long rows, long head) {
  const long size = pages.page_size, width = pages.head_dim;
  typename T::Code codes[kHeadDimMax];
  for (long row = 0; row < rows; ++row) {
    typename T::Code* keys = head_of<T>(pages, slots[row] / size, head);
    typename T::Code* values = keys + pages.value_offset;
    const long offset = slots[row] % size;
    const float key_scale = encode_row<T>(k + row * k_stride + head * width, width, codes);
    for (long d = 0; d < width; ++d) keys[d * size + offset] = codes[d];
    const float value_scale =
        encode_row<T>(v + row * v_stride + head * width, width, values + offset * width);
    if (T::kScaled) {
      scales_of(pages, keys)[offset] = key_scale;
      scales_of(pages, values)[offset] = value_scale;
    }
  }
}

// Writes one head of all rows, so that a page's rows of K are in cache while their slots are
// filled.
inline void kv_write_head(const PmPages* pages, const float* k, long k_stride, const float* v,
                          long v_stride, const int64_t* slots, long rows, long head) {
  with_kv_type(*pages, [&](auto type) {
    write_head<decltype(type)>(*pages, k, k_stride, v, v_stride, slots, rows, head);
  });
}

// Returns 0, or 1 + the first row whose slot is outside the pool.
inline long check_slots(const PmPages* pages, const int64_t* slots, long rows) {
  for (long row = 0; row < rows; ++row) {
    if (slots[row] < 0 || slots[row] >= pages->page_count * pages->page_size) return 1 + row;
  }
  return 0;
}

long kv_write(const PmPages* pages, const float* k, long k_stride, const float* v, long v_stride,
              const int64_t* slots, long rows, int threads) {
  if (const long bad = check_slots(pages, slots, rows)) return bad;
  if (rows * pages->kv_heads * pages->head_dim < (1 << 17)) threads = 1;
  Counter work;
  parallel(threads, [&] {
    long head, end;
    while (work.take(pages->kv_heads, 1, &head, &end)) {
      kv_write_head(pages, k, k_stride, v, v_stride, slots, rows, head);
    }
  });
  return 0;
}

}  // namespace

}  // namespace pm
