// Locates the K and V of a block of 64 positions in the pages of one sequence.
#pragma once

#include <string.h>

#include "kv_types.h"

namespace {

constexpr int kBlock = 64, kBlockVectors = kBlock / kLanes;

// A head's K and V in the pages of one sequence.
template <typename T>
struct HeadPages {
  using Code = typename T::Code;
  const PmPages& pages;
  const int32_t* table;
  long kv_head;

  bool whole_vectors() const { return pages.page_size % kLanes == 0; }
  Code* keys(long position) const {
    return head_of<T>(pages, table[position / pages.page_size], kv_head);
  }
};

// Slots [first, end) of a block; the others take no part.
struct Slots {
  int first, end;
};

// The addresses of a block's slots. K vector j at dimension d: keys[j] + d * key_stride.
template <typename T>
struct Block {
  using Code = typename T::Code;
  const Code* keys[kBlockVectors];
  const Code* next_keys[kBlockVectors];  // of the following block, to prefetch
  long key_stride;
  const Code* values[kBlock];
  float key_scales[T::kScaled ? kBlock : 1];
  float value_scales[T::kScaled ? kBlock : 1];
};

// Locates the K vectors of `slots` of the block at position `start`, in pages of whole vectors.
template <typename T>
void locate_keys(const HeadPages<T>& head, long start, Slots slots,
                 const typename T::Code** keys) {
  for (int j = slots.first / kLanes; j * kLanes < slots.end; ++j) {
    const long position = start + j * kLanes;
    keys[j] = head.keys(position) + position % head.pages.page_size;
  }
}

// Locates `slots` of the block at position `start`. `key_copy`: room for the block's K,
// [head_dim][64], to which K is copied if vectors may cross pages.
template <typename T>
void locate(const HeadPages<T>& head, long start, Slots slots, typename T::Code* key_copy,
            Block<T>* block) {
  const PmPages& pages = head.pages;
  const bool whole = head.whole_vectors();
  if (T::kScaled) {
    memset(block->key_scales, 0, sizeof block->key_scales);
    memset(block->value_scales, 0, sizeof block->value_scales);
  }
  for (int slot = slots.first, end; slot < slots.end; slot = end) {  // a page at a time
    const long position = start + slot, offset = position % pages.page_size;
    const long left = pages.page_size - offset;
    end = left < slots.end - slot ? slot + static_cast<int>(left) : slots.end;
    typename T::Code* keys = head.keys(position);
    typename T::Code* values = keys + pages.value_offset;
    for (int i = slot; i < end; ++i) {
      block->values[i] = values + (offset + i - slot) * pages.head_dim;
    }
    if (T::kScaled) {
      const float* of_keys = scales_of(pages, keys) + offset;
      const float* of_values = scales_of(pages, values) + offset;
      for (int i = slot; i < end; ++i) {
        block->key_scales[i] = of_keys[i - slot] * T::kUnit;
        block->value_scales[i] = of_values[i - slot] * T::kUnit;
      }
    }
    for (long d = 0; !whole && d < pages.head_dim; ++d) {
      const typename T::Code* row = keys + d * pages.page_size + offset;
      for (int i = slot; i < end; ++i) key_copy[d * kBlock + i] = row[i - slot];
    }
  }
  block->key_stride = whole ? pages.page_size : kBlock;
  if (whole) return locate_keys(head, start, slots, block->keys);
  for (int j = 0; j < kBlockVectors; ++j) block->keys[j] = key_copy + j * kLanes;
}

// Prefetches the first line of K, of V and of the scales of each vector of the next block, so that
// their addresses are translated (TLB misses) all at the same time. Prefetches that wait for this
// one after the other hold up those behind them.
template <typename T>
void touch_next(const PmPages& pages, const Block<T>& block) {
  for (const auto* keys : block.next_keys) {
    prefetch_far(keys);
    prefetch_far(keys + pages.value_offset);
    if (T::kScaled) {
      auto* codes = const_cast<typename T::Code*>(keys);
      prefetch_far(scales_of(pages, codes));
      prefetch_far(scales_of(pages, codes + pages.value_offset));
    }
    __asm__ volatile("");  // GCC drops loops that only prefetch
  }
}

}  // namespace
