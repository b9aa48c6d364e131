// Applies masks, biases and penalties to rows, and undoes them. The columns touched are few, and
// scattered over a row. Their values are gathered a block at a time, so that cache misses overlap
// and the arithmetic is vectorised.
#include <math.h>

#include "pagemesh_native.h"
#include "parallel.h"

namespace {

constexpr long kEditWork = 1 << 16;  // columns below which one thread is enough (see parallel.h)
constexpr long kEditBlock = 256;

// Calls visit(place in `saved`, column) for every column that `edits` touches.
template <typename Visit>
void for_touched(const PmEdits& edits, long width, Visit visit) {
  const auto some = [&](const int64_t* columns, long count, long first) {
    for (long i = 0; i < count; ++i) {
      if (columns[i] >= 0 && columns[i] < width) visit(first + i, columns[i]);
    }
    return first + count;
  };
  const auto all = [&](const uint32_t* columns, long count, long first) {
    for (long i = 0; i < count; ++i) visit(first + i, columns[i]);
    return first + count;
  };
  long at = some(edits.masked, edits.masked_count, 0);
  at = some(edits.biased, edits.biased_count, at);
  at = all(edits.repeated, edits.repeated_count, at);
  all(edits.counted, edits.counted_count, at);
}

// Gathers the values of `columns` a block at a time, calls change(values, first, count) for those
// of columns[first, first + count), and writes them back.
template <typename Change>
void for_blocks(float* row, const uint32_t* columns, long count, Change change) {
  float values[kEditBlock];
  for (long first = 0; first < count; first += kEditBlock) {
    const long block = count - first < kEditBlock ? count - first : kEditBlock;
    for (long i = 0; i < block; ++i) values[i] = row[columns[first + i]];
    change(values, first, block);
    for (long i = 0; i < block; ++i) row[columns[first + i]] = values[i];
  }
}

void edit(float* row, long width, const PmEdits& edits, float* saved) {
  for_touched(edits, width, [=](long place, long column) { saved[place] = row[column]; });
  const auto is_there = [=](int64_t column) { return column >= 0 && column < width; };
  for (long i = 0; i < edits.masked_count; ++i) {
    if (is_there(edits.masked[i])) row[edits.masked[i]] = -INFINITY;
  }
  for (long i = 0; i < edits.biased_count; ++i) {
    if (is_there(edits.biased[i])) row[edits.biased[i]] += edits.biases[i];
  }
  const float penalty = edits.repetition;
  for_blocks(row, edits.repeated, edits.repeated_count, [=](float* values, long, long count) {
    for (long i = 0; i < count; ++i) {
      const float less = values[i] / penalty, more = values[i] * penalty;
      values[i] = values[i] > 0.0f ? less : more;
    }
  });
  const float frequency = edits.frequency, presence = edits.presence;
  const float* counts = edits.counts;
  for_blocks(row, edits.counted, edits.counted_count, [=](float* values, long first, long count) {
    for (long i = 0; i < count; ++i) {
      values[i] = (values[i] - frequency * counts[first + i]) - presence;
    }
  });
}

template <typename Body>
void for_edited(const int64_t* saved_indptr, long count, int threads, Body body) {
  if (saved_indptr[count] < kEditWork) threads = 1;
  pm::Counter work;
  pm::parallel(threads, [&] {
    long begin, end;
    while (work.take(count, 1, &begin, &end)) body(begin);
  });
}

}  // namespace

extern "C" {

PM_EXPORT long pm_edit_rows(float* x, long x_stride, long x_rows, long width, const int64_t* rows,
                            const PmEdits* const* edits, const int64_t* saved_indptr, long count,
                            float* saved, int threads) {
  for (long i = 0; i < count; ++i) {
    if (rows[i] < 0 || rows[i] >= x_rows) return 1 + i;
  }
  for_edited(saved_indptr, count, threads, [=](long i) {
    edit(x + rows[i] * x_stride, width, *edits[i], saved + saved_indptr[i]);
  });
  return 0;
}

PM_EXPORT void pm_restore_rows(float* x, long x_stride, long width, const int64_t* rows,
                               const PmEdits* const* edits, const int64_t* saved_indptr,
                               long count, const float* saved, int threads) {
  for_edited(saved_indptr, count, threads, [=](long i) {
    float* row = x + rows[i] * x_stride;
    const float* own = saved + saved_indptr[i];
    for_touched(*edits[i], width, [=](long place, long column) { row[column] = own[place]; });
  });
}

}  // extern "C"
