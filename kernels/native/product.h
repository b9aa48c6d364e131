// Chooses the code that computes a product: vectors (linear.h, gated.h) or, where the machine has
// them and there are enough rows, matrix tiles (tile_linear.h). With either, a row's bits do not
// depend on the other rows, but the two give different bits: products that are to be row-invariant
// all use the same one. Rows that have to be rounded, paired or laid out for tiles are first
// written to memory in that form.
#pragma once

#include "gated.h"
#include "memory.h"
#if PM_LEVEL == 4
#include "tile_linear.h"
#endif

namespace {

#if PM_LEVEL == 4

// Up to this many rows vectors keep up with memory, and rows need not be split.
constexpr long kVectorRows = 4;

// A machine with tiles prepares no slim weights; if it is given some, vectors multiply them.
inline bool on_tiles(long rows, const PmMatrix& matrix, bool row_invariant) {
  return (row_invariant || rows > kVectorRows) && matrix.weight_type != PM_WEIGHT_SLIM_BFLOAT16;
}

#else

inline bool on_tiles(long, const PmMatrix&, bool) { return false; }

#endif

RowForm form_of(long rows, const PmMatrix& matrix, bool row_invariant) {
  if (on_tiles(rows, matrix, row_invariant)) return RowForm::kTiled;
  if (!weights_of(matrix).rounds_rows) return RowForm::kPlain;
  return PM_LEVEL >= 3 ? RowForm::kPaired : RowForm::kRounded;
}

// Lanes of a row of `k` rounded values: in pairs, or one by one on levels without pairs.
inline long rounded_lanes(long k) { return PM_LEVEL >= 3 ? pieces(k, 2) : k; }

// Floats of memory that rows take in the form that their product reads; `rounds`: to bfloat16.
inline long formed_floats(long rows, long k, bool rounds) {
#if PM_LEVEL == 4
  const long tiles = pieces(rows, kTileHeight) * pieces(k, kTileDepth);
  return tiles * row_parts(rounds) * kTileWords * static_cast<long>(sizeof(Word)) /
         static_cast<long>(sizeof(float));
#else
  return rounds ? rows * rounded_lanes(k) : 0;
#endif
}

#if PM_LEVEL == 4
inline RowTiles row_tiles(const LinearCall& call, float* memory) {
  return {reinterpret_cast<Word*>(memory), call.rows, call.k, call.weights.rounds_rows};
}
#endif

// Writes a row of `call` to `memory`, in the call's form.
inline void form_row(const LinearCall& call, long row, float* memory) {
  const float* x = call.x + row * call.x_stride;
  float* to = memory + row * rounded_lanes(call.k);
  switch (call.form) {
    case RowForm::kPlain: break;
    case RowForm::kRounded: return round_row(x, to, call.k);
#if PM_LEVEL >= 3
    case RowForm::kPaired: return pair_row(x, to, call.k);
#endif
#if PM_LEVEL == 4
    case RowForm::kTiled: return row_tiles(call, memory).put(x, row, call.k);
#endif
    default: break;
  }
}

LinearPlan plan_product(long rows, const PmMatrix& matrix, bool row_invariant, int threads) {
#if PM_LEVEL == 4
  if (on_tiles(rows, matrix, row_invariant)) return plan_tile_linear(rows, matrix.n, threads);
#endif
  (void)row_invariant;
  return plan_linear(rows, matrix.n, weights_of(matrix), threads);
}

// The plan for both halves of a weight whose first half is a gate; see can_gate.
LinearPlan plan_gated_product(long rows, const PmMatrix& matrix, bool row_invariant, int threads) {
  if (!can_gate(matrix.n)) return plan_product(rows, matrix, row_invariant, threads);
#if PM_LEVEL == 4
  if (on_tiles(rows, matrix, row_invariant)) return plan_tile_gated(rows, matrix.n, threads);
#endif
  return plan_gated(rows, matrix.n, weights_of(matrix), threads);
}

// One thread's share of a product, gated if its sums are held; `memory` has the rows that form_row
// wrote.
void product_share(LinearCall call, const LinearPlan& plan, float* memory, pm::Counter& work,
                   int thread, int team, float* carry, Next after) {
#if PM_LEVEL == 4
  if (call.form == RowForm::kTiled) {
    return tile_share(call, row_tiles(call, memory), plan, work, thread, team, carry, after);
  }
#endif
  if (call.form != RowForm::kPlain) {
    call.x = memory;
    call.x_stride = rounded_lanes(call.k);
  }
  (call.hold ? gated_share : linear_share)(call, plan, work, thread, team, carry, after);
}

void linear(const float* x, long x_stride, const PmMatrix* matrix, float* out, long out_stride,
            long rows, int row_invariant, int threads) {
  if (rows == 0) return;
  const long n = matrix->n, k = matrix->k;
  const RowForm form = form_of(rows, *matrix, row_invariant);
  const LinearCall call{x, x_stride, weights_of(*matrix), matrix->bias, out, out_stride, rows, n,
                        k, false, false, form};
  if ((rows + kWeightWork) * n * k < kSerialWork) threads = 1;
  const LinearPlan plan = plan_product(rows, *matrix, row_invariant, threads);
  const bool formed = form != RowForm::kPlain;
  float* memory = nullptr;
  if (formed) {
    const size_t bytes =
        sizeof(float) * static_cast<size_t>(formed_floats(rows, k, weights_of(*matrix).rounds_rows));
    memory = static_cast<float*>(pm::take_memory(bytes, kLineBytes));
  }
  pm::Counter work, forms;
  pm::parallel(threads, [&] {
    long begin, end;
    while (formed && forms.take(rows, 8, &begin, &end)) {
      for (; begin < end; ++begin) form_row(call, begin, memory);
    }
    if (formed) pm::barrier();
    alignas(kLineBytes) float carry[kCarryFloats];
    product_share(call, plan, memory, work, pm::thread_index(), pm::thread_count(), carry,
                  kNothingNext);
  });
  free(memory);
}

}  // namespace
