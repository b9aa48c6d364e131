// Reads a sequence's K and V from their pages, as floats.
#pragma once

#include "kv_types.h"
#include "parallel.h"

namespace {

// Decodes `slots` slots of one page and head from `offset` on, to rows [slots][head_dim].
template <typename T>
void read_head(const PmPages& pages, int64_t page, long head, long offset, long slots, float* k,
               float* v) {
  const long size = pages.page_size, width = pages.head_dim;
  typename T::Code* keys = head_of<T>(pages, page, head);
  typename T::Code* values = keys + pages.value_offset;
  for (long slot = 0; slot < slots; ++slot) {
    const long at = offset + slot;
    const float key_scale = T::kScaled ? scales_of(pages, keys)[at] : 1.0f;
    const float value_scale = T::kScaled ? scales_of(pages, values)[at] : 1.0f;
    for (long d = 0; d < width; ++d) {
      k[slot * width + d] = T::decode_one(keys[d * size + at]) * key_scale;
    }
    for (long d = 0; d < width; ++d) {
      v[slot * width + d] = T::decode_one(values[at * width + d]) * value_scale;
    }
  }
}

long kv_gather(const PmPages* pages, const int32_t* table, long table_pages, long first,
               long count, float* k, float* v, int threads) {
  const long size = pages->page_size, width = pages->head_dim;
  if (first < 0 || count < 0 || first + count > table_pages * size) return 1 + table_pages;
  if (count == 0) return 0;
  const long first_page = first / size, end_page = (first + count - 1) / size + 1;
  for (long i = first_page; i < end_page; ++i) {
    if (table[i] < 0 || table[i] >= pages->page_count) return 1 + i;
  }
  const long units = (end_page - first_page) * pages->kv_heads;
  pm::Counter work;
  pm::parallel(threads, [&] {
    long begin, end;
    while (work.take(units, 8, &begin, &end)) {
      for (long unit = begin; unit < end; ++unit) {
        const long index = first_page + unit / pages->kv_heads, head = unit % pages->kv_heads;
        const long low = index * size > first ? index * size : first;
        const long high = (index + 1) * size < first + count ? (index + 1) * size : first + count;
        const long at = (head * count + low - first) * width;
        with_kv_type(*pages, [&](auto type) {
          read_head<decltype(type)>(*pages, table[index], head, low - index * size, high - low,
                                    k + at, v + at);
        });
      }
    }
  });
  return 0;
}

}  // namespace
