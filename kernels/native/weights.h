// A packed weight: panels of 16 columns, each stored as [K][16]; float32, or int8 codes with one
// float32 scale a column. A panel of codes ends with its 16 scales, as four more rows of bytes.
//
// Codes are multiplied as the whole numbers that they are, and a column's finished sum by its
// scale: one multiplication an element, and the sum is the same chain of multiply-adds whether
// codes became floats in registers or in a block of them beforehand.
#pragma once

#include "kv_types.h"

namespace {

constexpr long kLineBytes = 64;

struct Weights {
  const char* panels;
  long panel_bytes;
  long row_bytes;  // of 16 columns at one value of K
  long k;
  bool scaled;

  const char* panel(long index) const { return panels + index * panel_bytes; }
  V scales(long index) const {
    return load(reinterpret_cast<const float*>(panel(index) + k * row_bytes));
  }
};

inline bool is_scaled(const PmMatrix& matrix) { return matrix.weight_type == PM_WEIGHT_INT8; }

inline Weights weights_of(const PmMatrix& matrix) {
  const bool scaled = is_scaled(matrix);
  const long row_bytes = kLanes * static_cast<long>(scaled ? sizeof(int8_t) : sizeof(float));
  const long scales_bytes = scaled ? kLanes * static_cast<long>(sizeof(float)) : 0;
  return {static_cast<const char*>(matrix.panels), matrix.k * row_bytes + scales_bytes, row_bytes,
          matrix.k, scaled};
}

// Weights that come next, to be fetched meanwhile: panels from `at` on, `apart_bytes` apart, in
// rows of `row_bytes`. Without any, `at` is null.
struct Next {
  const char* at;
  long apart_bytes;
  long row_bytes;
};

constexpr Next kNothingNext{nullptr, 0, 0};

// What is read of `weights` from panel `panel` and row `k` on.
inline Next next_at(const Weights& weights, long panel, long k = 0) {
  return {weights.panel(panel) + k * weights.row_bytes, weights.panel_bytes, weights.row_bytes};
}

}  // namespace
