// out = x * weight^T + bias over panels of 16 columns stored as [K][16]. Every output element is
// one chain of multiply-adds over K in ascending order, whatever the tile it was computed in: a
// row's result does not depend on the other rows, on the tiling or on the threads.
#pragma once

namespace {

#if PM_LEVEL == 2
constexpr int kTileRows = 8, kTilePanels = 3;
#elif PM_LEVEL == 1
constexpr int kTileRows = 6, kTilePanels = 1;
#else
constexpr int kTileRows = 2, kTilePanels = 1;
#endif
constexpr long kPrefetchFloats = 512;
constexpr long kRunsPerThread = 4;
// Below some 80 us of work (see parallel.h), in multiply-adds of a tile that is in cache; reading
// a weight costs as much as eight of them.
constexpr long kSerialWork = 1 << 23, kWeightWork = 8;

struct LinearCall {
  const float* x;
  long x_stride;
  const float* packed;
  const float* bias;
  float* out;
  long out_stride;
  long rows, n, k;
};

// Lines fetched ahead in each step over k: from the stream itself when it is read once, else
// this tile's share of the panels that come next.
enum Ahead { kNothing, kStream, kOneLine, kTwoLines };

template <int R, int P, Ahead A>
void linear_tile(const LinearCall& call, long row, long panel, const float* next) {
  const float* x = call.x + row * call.x_stride;
  const float* weight = call.packed + panel * call.k * kLanes;
  const long panel_floats = call.k * kLanes;
  V sum[R][P];
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) sum[r][p] = zero();
  }
#pragma GCC unroll 4
  for (long k = 0; k < call.k; ++k) {
    V w[P];
    for (int p = 0; p < P; ++p) {
      w[p] = load(weight + p * panel_floats + k * kLanes);
      if (A == kStream) prefetch(weight + p * panel_floats + k * kLanes + kPrefetchFloats);
    }
    if (A == kOneLine) prefetch(next + k * kLanes);
    if (A == kTwoLines) {
      prefetch(next + 2 * k * kLanes);
      prefetch(next + (2 * k + 1) * kLanes);
    }
    for (int r = 0; r < R; ++r) {
      V value = splat(x[r * call.x_stride + k]);
      for (int p = 0; p < P; ++p) sum[r][p] = fma(value, w[p], sum[r][p]);
    }
  }
  for (int p = 0; p < P; ++p) {
    const long column = (panel + p) * kLanes;
    const int width = call.n - column < kLanes ? static_cast<int>(call.n - column) : kLanes;
    for (int r = 0; r < R; ++r) {
      V value = sum[r][p];
      if (call.bias) value = add(value, load_some(call.bias + column, width));
      store_some(call.out + (row + r) * call.out_stride + column, value, width);
    }
  }
}

using LinearTile = void (*)(const LinearCall&, long, long, const float*);

template <int P, Ahead A>
LinearTile linear_tile_of(long rows) {
  switch (rows) {
    case 1: return linear_tile<1, P, A>;
    case 2: return linear_tile<2, P, A>;
#if PM_LEVEL > 0
    case 3: return linear_tile<3, P, A>;
    case 4: return linear_tile<4, P, A>;
    case 5: return linear_tile<5, P, A>;
    case 6: return linear_tile<6, P, A>;
#endif
#if PM_LEVEL == 2
    case 7: return linear_tile<7, P, A>;
    case 8: return linear_tile<8, P, A>;
#endif
    default: return nullptr;
  }
}

template <int P>
LinearTile linear_tile_of(long rows, Ahead ahead) {
  switch (ahead) {
    case kStream: return linear_tile_of<P, kStream>(rows);
    case kOneLine: return linear_tile_of<P, kOneLine>(rows);
    case kTwoLines: return linear_tile_of<P, kTwoLines>(rows);
    default: return linear_tile_of<P, kNothing>(rows);
  }
}

// P panels for all rows, in tiles of even height. `next` are the panels this thread takes after
// these, as many again, or null.
template <int P>
void linear_panels(const LinearCall& call, long panel, const float* next) {
  const long tiles = (call.rows + kTileRows - 1) / kTileRows;
  const long lines = P * call.k;
  const long share = tiles == 1 ? 0 : tiles < P ? 2 : 1;  // lines a step, P of them wanted
  long row = 0;
  for (long tile = 0; tile < tiles; ++tile) {
    const long height = (call.rows - row + tiles - tile - 1) / (tiles - tile);
    const long first_line = tile * share * call.k;
    Ahead ahead = tiles == 1 ? kStream : kNothing;
    if (share && next && first_line + share * call.k <= lines) {
      ahead = share == 1 ? kOneLine : kTwoLines;
    } else if (share == 2 && next && first_line < lines) {
      ahead = kOneLine;
    }
    const float* to_come = next ? next + first_line * kLanes : nullptr;
    linear_tile_of<P>(height, ahead)(call, row, panel, to_come);
    row += height;
  }
}

// A thread's run of panels; `after` is where its next run starts, or null.
template <int P>
void linear_run(const LinearCall& call, long begin, long end, const float* after) {
  const long floats = call.k * kLanes;
  long panel = begin;
  for (; panel + P <= end; panel += P) {
    const bool more = panel + 2 * P <= end;
    linear_panels<P>(call, panel, more ? call.packed + (panel + P) * floats : after);
  }
  for (; panel < end; ++panel) linear_panels<1>(call, panel, nullptr);
}

void linear(const float* x, long x_stride, const float* packed, const float* bias, float* out,
            long out_stride, long rows, long n, long k, int threads) {
  if (rows == 0) return;
  const LinearCall call{x, x_stride, packed, bias, out, out_stride, rows, n, k};
  const long panels = (n + kLanes - 1) / kLanes;
  // Few rows: one panel at a time is one stream at memory speed. More: wide tiles, so that
  // each value of x is used for several panels while it is in a register.
  const int wide = rows > kTileRows ? kTilePanels : 1;
  long step = panels / (threads * kRunsPerThread) / wide * wide;
  if (step < wide) step = wide;
  if ((rows + kWeightWork) * n * k < kSerialWork) threads = 1;
  if (threads == 1) step = panels;
  pm::Counter work(panels);
  pm::parallel(threads, [&] {
    long begin, end, next_begin, next_end;
    bool more = work.take(step, &begin, &end);
    while (more) {
      // Claimed one ahead, so that what comes next can be fetched meanwhile.
      more = work.take(step, &next_begin, &next_end);
      const bool full = more && next_end - next_begin >= wide;
      const float* after = full ? packed + next_begin * k * kLanes : nullptr;
      if (wide == 1) linear_run<1>(call, begin, end, after);
      else linear_run<kTilePanels>(call, begin, end, after);
      begin = next_begin;
      end = next_end;
    }
  });
}

}  // namespace
