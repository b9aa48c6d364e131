// New K and V rows into their pages, head by head.
#pragma once

#include <string.h>

#include "pagemesh_native.h"

namespace pm {

namespace {  // compiled once per level: no level's code may stand in for another's

inline float* head_of(const PmPages* pages, int64_t page, long head) {
  return pages->base + page * pages->page_stride + head * pages->head_stride;
}

// One head of all rows, so that the slots of one page's key rows are filled while in cache.
inline void kv_write_head(const PmPages* pages, const float* k, long k_stride, const float* v,
                          long v_stride, const int64_t* slots, long rows, long head) {
  const long size = pages->page_size, width = pages->head_dim;
  for (long row = 0; row < rows; ++row) {
    float* page = head_of(pages, slots[row] / size, head);
    const long offset = slots[row] % size;
    const float* key = k + row * k_stride + head * width;
    for (long d = 0; d < width; ++d) page[d * size + offset] = key[d];
    memcpy(page + pages->value_offset + offset * width, v + row * v_stride + head * width,
           sizeof(float) * static_cast<size_t>(width));
  }
}

}  // namespace

}  // namespace pm
