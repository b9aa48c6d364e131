// A packed weight: panels of 16 columns, each stored as [K][16]; float32, bfloat16, float16, or
// int8 codes with one float32 scale per column; or bfloat16 in twelve bits (slim_layout.h). A panel
// of int8 ends with its 16 scales, as four more rows of bytes.
//
// Codes of all types are multiplied as the float32 values for which they stand; for int8, a
// column's finished sum is multiplied by its scale, once per element. A sum is the same chain of
// multiply-adds whether codes are decoded in registers or a block at a time beforehand. So weights
// that fit in half precision give the same bits from two bytes as from four, or from twelve bits.
#pragma once

#include "kv_types.h"
#include "slim_layout.h"

namespace {

constexpr long kLineBytes = 64;

struct Weights {
  const char* panels;
  long panel_bytes;
  long row_bytes;  // of 16 columns at one value of K
  long k;
  long type;  // PmWeightType
  bool rounds_rows;
  long rows_at;  // offset in bytes of a panel's first row

  bool scaled() const { return type == PM_WEIGHT_INT8; }
  bool slim() const { return type == PM_WEIGHT_SLIM_BFLOAT16; }
  bool narrow() const { return type != PM_WEIGHT_FLOAT32; }  // fewer than four bytes per weight
  const char* panel(long index) const { return panels + index * panel_bytes; }
  V scales(long index) const {
    return load(reinterpret_cast<const float*>(panel(index) + k * row_bytes));
  }
};

// Calls body(T{}) with the type of a weight that is not slim.
template <typename Body>
inline auto with_weight_type(long type, Body body) {
  switch (type) {
    case PM_WEIGHT_INT8: return body(Int8{});
    case PM_WEIGHT_BFLOAT16: return body(Bfloat16{});
    case PM_WEIGHT_FLOAT16: return body(Float16{});
    default: return body(Float32{});
  }
}

inline Weights weights_of(const PmMatrix& matrix) {
  if (matrix.weight_type == PM_WEIGHT_SLIM_BFLOAT16) {
    return {static_cast<const char*>(matrix.panels), pm::slim_panel_bytes(matrix.k),
            pm::kSlimGroupBytes / pm::kSlimDepth, matrix.k, matrix.weight_type,
            matrix.rounds_rows != 0, pm::slim_groups_at(matrix.k)};
  }
  return with_weight_type(matrix.weight_type, [&](auto type) -> Weights {
    using T = decltype(type);
    const long row_bytes = kLanes * static_cast<long>(sizeof(typename T::Code));
    const long scales_bytes = T::kScaled ? kLanes * static_cast<long>(sizeof(float)) : 0;
    return {static_cast<const char*>(matrix.panels), matrix.k * row_bytes + scales_bytes,
            row_bytes, matrix.k, matrix.weight_type,
            matrix.rounds_rows != 0 && (T::kScaled || matrix.weight_type == PM_WEIGHT_BFLOAT16), 0};
  });
}

// Whether a decoder's products round their rows: all of them do, or none.
inline bool rounds_rows(const PmDecoder& model) { return weights_of(model.head).rounds_rows; }

// The weights that are read next, to be prefetched: panels from `at` on, `apart_bytes` apart, in
// rows of `row_bytes`. `at` is null if there are none.
struct Next {
  const char* at;
  long apart_bytes;
  long row_bytes;
};

constexpr Next kNothingNext{nullptr, 0, 0};

// The part of `weights` that is read from panel `panel` and row `k` on.
inline Next next_at(const Weights& weights, long panel, long k = 0) {
  const char* at = weights.panel(panel) + weights.rows_at + k * weights.row_bytes;
  return {at, weights.panel_bytes, weights.row_bytes};
}

}  // namespace
