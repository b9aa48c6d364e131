// Which code computes a product: vectors (linear.h, gated.h) or, on a machine that has them and
// where there are enough rows, matrix tiles (tile_linear.h). Each of them gives a row the same
// bits in any company, but not the other's: what is to be row-invariant is all done on one.
#pragma once

#include "gated.h"
#if PM_LEVEL == 3
#include "tile_linear.h"
#endif

namespace {

#if PM_LEVEL == 3

// Up to so many rows the vectors keep up with memory, and need no splitting.
constexpr long kVectorRows = 4;

inline bool on_tiles(long rows, bool row_invariant) { return row_invariant || rows > kVectorRows; }

// Floats of memory in which the rows of a product are split.
inline long split_floats(long rows, long k) {
  const long tiles = pieces(rows, kTileHeight) * pieces(k, kTileDepth);
  return tiles * kRowParts * kTileWords * static_cast<long>(sizeof(Word)) /
         static_cast<long>(sizeof(float));
}

inline SplitRows split_rows(const LinearCall& call, float* memory) {
  return {reinterpret_cast<Word*>(memory), call.rows, call.k};
}

inline void split_row(const LinearCall& call, long row, float* memory) {
  split_rows(call, memory).split(call.x + row * call.x_stride, row, call.k);
}

#else

inline bool on_tiles(long, bool) { return false; }
inline long split_floats(long, long) { return 0; }
inline void split_row(const LinearCall&, long, float*) {}

#endif

LinearPlan plan_product(long rows, const PmMatrix& matrix, bool row_invariant, int threads) {
#if PM_LEVEL == 3
  if (on_tiles(rows, row_invariant)) return plan_tile_linear(rows, matrix.n, threads);
#endif
  (void)row_invariant;
  return plan_linear(rows, matrix.n, weights_of(matrix).narrow(), threads);
}

// Of both halves of a weight whose first half is a gate; see can_gate.
LinearPlan plan_gated_product(long rows, const PmMatrix& matrix, bool row_invariant, int threads) {
  if (!can_gate(matrix.n)) return plan_product(rows, matrix, row_invariant, threads);
#if PM_LEVEL == 3
  if (on_tiles(rows, row_invariant)) return plan_tile_gated(rows, matrix.n, threads);
#endif
  return plan_gated(rows, matrix.n, weights_of(matrix).narrow(), threads);
}

// One thread's share of a product, gated when its sums are held; what is done on tiles was split
// into `memory` by split_row.
void product_share(const LinearCall& call, const LinearPlan& plan, bool tiled, float* memory,
                   pm::Counter& work, int thread, int team, float* carry, Next after) {
#if PM_LEVEL == 3
  if (tiled) {
    return tile_share(call, split_rows(call, memory), plan, work, thread, team, carry, after);
  }
#endif
  (void)tiled, (void)memory;
  (call.hold ? gated_share : linear_share)(call, plan, work, thread, team, carry, after);
}

void linear(const float* x, long x_stride, const void* panels, long weight_type,
            const float* bias, float* out, long out_stride, long rows, long n, long k,
            int row_invariant, int threads) {
  if (rows == 0) return;
  const PmMatrix matrix{panels, bias, n, k, weight_type};
  const LinearCall call{x, x_stride, weights_of(matrix), bias, out, out_stride, rows, n, k,
                        false, false};
  if ((rows + kWeightWork) * n * k < kSerialWork) threads = 1;
  const LinearPlan plan = plan_product(rows, matrix, row_invariant, threads);
  const bool tiled = on_tiles(rows, row_invariant);
  float* memory = nullptr;
  if (tiled) {
    const size_t bytes = sizeof(float) * static_cast<size_t>(split_floats(rows, k));
    memory = static_cast<float*>(aligned_alloc(kLineBytes, bytes));
  }
  pm::Counter work, splits;
  pm::parallel(threads, [&] {
    long begin, end;
    while (tiled && splits.take(rows, 8, &begin, &end)) {
      for (; begin < end; ++begin) split_row(call, begin, memory);
    }
    if (tiled) pm::barrier();
    alignas(kLineBytes) float carry[kCarryFloats];
    product_share(call, plan, tiled, memory, work, pm::thread_index(), pm::thread_count(), carry,
                  kNothingNext);
  });
  free(memory);
}

}  // namespace
