// Products of few rows, which read the weight once, at memory speed.
#pragma once

#include <array>
#include <type_traits>
#include <utility>

#include "linear_call.h"
#include "slim_weights.h"

namespace {

template <long COUNT>
using Count = std::integral_constant<long, COUNT>;

// Multiplies R rows by P panels from `panel` on, `apart` panels apart, over all of K. Prefetches
// ahead in these panels, and towards their end in `next`. Sums go to `carry`, [P][kStreamRows][16].
template <typename T, typename M, int R, int P>
void stream_panels(const LinearCall& call, long panel, long apart, float* carry, Next next) {
  constexpr long kRowBytes = kLanes * static_cast<long>(sizeof(typename T::Code));
  constexpr long kAhead = kAheadLines * (kLineBytes / kRowBytes);  // in values of K
  const char* weight = call.weights.panel(panel);
  long apart_bytes = apart * call.weights.panel_bytes;
  V sum[R][P];
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) sum[r][p] = zero();
  }
  auto multiply = [&, apart_bytes](long k, auto count) {
    V w[P];
    for (int p = 0; p < P; ++p) {
      const char* at = weight + p * apart_bytes + k * kRowBytes;
      w[p] = M::template weights<T, count>(reinterpret_cast<const typename T::Code*>(at));
    }
    for (int r = 0; r < R; ++r) {
      const V value = splat(call.x[r * call.x_stride + k / M::kStep]);
      for (int p = 0; p < P; ++p) sum[r][p] = M::add_product(value, w[p], sum[r][p]);
    }
  };
  const Count<M::kStep> step;
  const long whole = call.k / M::kStep * M::kStep, own = whole > kAhead ? whole - kAhead : 0;
  const char* ahead = weight + (whole - own) * kRowBytes;
  long k = 0;
  for (long end = own; k < whole; end = whole) {
    for (; k + 4 <= end; k += 4, ahead += 4 * kRowBytes) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; i += step) {
        if (i * kRowBytes % kLineBytes == 0) {
          for (int p = 0; p < P; ++p) prefetch(ahead + p * apart_bytes + i * kRowBytes);
        }
        multiply(k + i, step);
      }
    }
    for (; k < end; k += step) multiply(k, step);
    ahead = next.at ? next.at : weight;
    apart_bytes = next.at ? next.apart_bytes : apart_bytes;
  }
  if (whole < call.k) multiply(whole, Count<1>{});
  for (int p = 0; p < P; ++p) {
    float* sums = carry + p * kStreamRows * kLanes;
    for (int r = 0; r < R; ++r) store(sums + r * kLanes, sum[r][p]);
    if (!call.hold) finish_tile<R, 1>(call, 0, panel + p, sums);
  }
}

using StreamPanels = void (*)(const LinearCall&, long, long, float*, Next);

// The same for slim weights, group by group.
template <typename M, int R, int P>
void stream_slim(const LinearCall& call, long panel, long apart, float* carry, Next next) {
  constexpr long kLines = pm::kSlimGroupBytes / kLineBytes, kAhead = kAheadLines / kLines;
  std::array<SlimPanel<M>, P> panels = slim_panels<M, P>(call.weights, panel, apart);
  constexpr int kVectors = SlimPanel<M>::kVectors;
  V sum[R][P];
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) sum[r][p] = zero();
  }
  const float* x = call.x;
  auto multiply = [&](auto half) {
    for (int p = 0; p < P; ++p) {
      V w[kVectors];
      panels[p].template take<half>(w);
      for (int i = 0; i < kVectors; ++i) {
        for (int r = 0; r < R; ++r) {
          sum[r][p] = M::add_product(splat(x[r * call.x_stride + i]), w[i], sum[r][p]);
        }
      }
    }
    x += kVectors;
  };
  const long whole = call.k / pm::kSlimDepth, own = whole > kAhead ? whole - kAhead : 0;
  const char* first = next_at(call.weights, panel).at;
  const char* ahead = first + (whole - own) * pm::kSlimGroupBytes;
  long apart_bytes = apart * call.weights.panel_bytes, group = 0;
  for (long end = own; group < whole; end = whole) {
    for (; group < end; ++group, ahead += pm::kSlimGroupBytes) {
      for (int p = 0; p < P; ++p) {
        for (long i = 0; i < kLines; ++i) prefetch(ahead + p * apart_bytes + i * kLineBytes);
      }
      multiply(Count<0>{});
      multiply(Count<1>{});
    }
    ahead = next.at ? next.at : first;
    apart_bytes = next.at ? next.apart_bytes : apart_bytes;
  }
  for (int p = 0; p < P; ++p) {
    float* sums = carry + p * kStreamRows * kLanes;
    for (int r = 0; r < R; ++r) store(sums + r * kLanes, sum[r][p]);
    if (!call.hold) finish_tile<R, 1>(call, 0, panel + p, sums);
  }
}

// Provides the function that reads P panels for R rows.
template <typename T, typename M>
struct Reader {
  template <int R, int P>
  static constexpr StreamPanels of = stream_panels<T, M, R, P>;
};

template <typename M>
struct SlimReader {
  template <int R, int P>
  static constexpr StreamPanels of = stream_slim<M, R, P>;
};

template <typename READER, int P, int... ROWS>
StreamPanels reader_of_rows(long rows, std::integer_sequence<int, ROWS...>) {
  constexpr StreamPanels kReaders[] = {READER::template of<ROWS + 1, P>...};
  return kReaders[rows - 1];
}

// The function that reads P panels for `rows` rows; null for more than MOST rows.
template <typename READER, int P, int MOST>
StreamPanels reader_of(long rows) {
  if (rows > MOST) return nullptr;
  return reader_of_rows<READER, P>(rows, std::make_integer_sequence<int, MOST>{});
}

// The functions that read a panel, and a pair of panels, for the rows of a call.
struct Stream {
  StreamPanels panel, pair;
};

Stream stream_of(const LinearCall& call) {
  return with_rows_of(call, [&](auto rows) -> Stream {
    using M = decltype(rows);
    if (call.weights.slim()) {
      return {reader_of<SlimReader<M>, 1, kSlimStreamRows>(call.rows),
              reader_of<SlimReader<M>, 2, kNarrowPairRows>(call.rows)};
    }
    return M::with_type(call.weights.type, [&](auto type) -> Stream {
      using T = decltype(type);
      constexpr bool kNarrow = sizeof(typename T::Code) < sizeof(float);
      constexpr int kMost = kNarrow && kNarrowPairRows > kPairRows ? kNarrowPairRows : kPairRows;
      StreamPanels pair = nullptr;
      if constexpr (kMost > 0) pair = reader_of<Reader<T, M>, 2, kMost>(call.rows);
      constexpr int kRows = kNarrow ? kStreamRows : kWideStreamRows;
      return {reader_of<Reader<T, M>, 1, kRows>(call.rows), pair};
    });
  });
}

}  // namespace
