// Attention of the portable level, with what it fetches ahead noted (test_windows.py).
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

namespace {

const char *pool_begin, *pool_end;
long strays;

void note(const void* address) {
  const char* at = static_cast<const char*>(address);
  strays += at < pool_begin || pool_end <= at;
}

// Leaves addresses of nothing where the next call has its variables.
__attribute__((noinline)) void soil_stack() {
  volatile char below[1 << 15];
  for (volatile char& each : below) each = 0x55;
}

}  // namespace

#define __builtin_prefetch(address, ...) note(address)
#define PM_LEVEL 0
#include "../../kernels/native/vec.h"

#include "../../kernels/native/parallel.h"
#include "../../kernels/native/rows.h"
#include "../../kernels/native/attention.h"
#include "../../kernels/native/gathering.cpp"
#include "../../kernels/native/memory.cpp"
#include "../../kernels/native/parallel.cpp"

const bool pm::fetches_far = false;

// Of one row at `position`: how many of its fetches are neither in a page nor one line behind it.
extern "C" long probe_strays(long position, long window) {
  constexpr long head_dim = 64, page_size = 16, page_count = 64;
  constexpr long value_offset = head_dim * page_size, page_stride = 2 * value_offset;
  static float pool[page_count * page_stride];
  static int32_t table[page_count];
  for (int i = 0; i < page_count; ++i) table[i] = i;
  const int32_t indptr[] = {0, page_count}, sequence = 0, at = static_cast<int32_t>(position);
  const PmPages pages = {pool, page_stride, value_offset, page_stride, page_count, page_size, 1,
                         head_dim, PM_KV_FLOAT32, 0};
  const float q[head_dim] = {};
  float out[head_dim];
  pool_begin = reinterpret_cast<const char*>(pool);
  pool_end = reinterpret_cast<const char*>(pool + page_count * page_stride) + 64;
  strays = 0;
  soil_stack();
  paged_attention(&pages, q, head_dim, out, head_dim, 1, 1, table, indptr, 1, &sequence, &at, 1.0f,
                  INFINITY, window, 1);
  return strays;
}
