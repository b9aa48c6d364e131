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
constexpr long kSerialWork = 1 << 15;  // multiply-adds below which threads cost more than they give

struct LinearCall {
  const float* x;
  long x_stride;
  const float* packed;
  const float* bias;
  float* out;
  long out_stride;
  long rows, n, k;
};

template <int R, int P>
void linear_tile(const LinearCall& call, long row, long panel) {
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
      if (R < kTileRows) prefetch(weight + p * panel_floats + k * kLanes + kPrefetchFloats);
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

using LinearTile = void (*)(const LinearCall&, long, long);

template <int P>
LinearTile linear_tile_of(long rows) {
  switch (rows) {
    case 1: return linear_tile<1, P>;
    case 2: return linear_tile<2, P>;
#if PM_LEVEL > 0
    case 3: return linear_tile<3, P>;
    case 4: return linear_tile<4, P>;
    case 5: return linear_tile<5, P>;
    case 6: return linear_tile<6, P>;
#endif
#if PM_LEVEL == 2
    case 7: return linear_tile<7, P>;
    case 8: return linear_tile<8, P>;
#endif
    default: return nullptr;
  }
}

template <int P>
void linear_panels(const LinearCall& call, long panel) {
  for (long row = 0; row < call.rows; row += kTileRows) {
    const long left = call.rows - row;
    linear_tile_of<P>(left < kTileRows ? left : kTileRows)(call, row, panel);
  }
}

void linear(const float* x, long x_stride, const float* packed, const float* bias, float* out,
            long out_stride, long rows, long n, long k, int threads) {
  const LinearCall call{x, x_stride, packed, bias, out, out_stride, rows, n, k};
  const long panels = (n + kLanes - 1) / kLanes;
  // Few rows: one panel at a time is one stream at memory speed. More: wide tiles, so that
  // each value of x is used for several panels while it is in a register.
  const int wide = rows > kTileRows ? kTilePanels : 1;
  long step = (panels / (threads * 6) / wide) * wide;
  if (step < wide) step = wide;
  if (rows * n * k < kSerialWork) threads = 1;
  pm::Counter work(panels);
  pm::parallel(threads, [&] {
    long begin, end;
    while (work.take(step, &begin, &end)) {
      long panel = begin;
#if PM_LEVEL == 2
      for (; wide == 3 && panel + 3 <= end; panel += 3) linear_panels<3>(call, panel);
#endif
      for (; panel < end; ++panel) linear_panels<1>(call, panel);
    }
  });
}

}  // namespace
