// Limits of the machine with which benchmarks compare kernels: reading memory once and in order,
// and multiply-adds on data in L1.
#pragma once

namespace {

constexpr long kProbePiece = 1 << 14;  // floats a thread takes at a time
// As many chains as fit in registers besides the value: 24 of 32 registers, or 12 of 16.
#if PM_LEVEL >= 2
constexpr int kProbeChains = 24;
#elif PM_LEVEL == 1 || defined(__aarch64__)
constexpr int kProbeChains = 6;
#else
constexpr int kProbeChains = 3;
#endif

float probe_stream(const float* data, long floats, int threads) {
  pm::Counter work;
  float total = 0.0f;
  float* shared = &total;
  pm::parallel(threads, [&, shared] {
    V sums[4] = {zero(), zero(), zero(), zero()};
    long begin, end;
    while (work.take(floats, kProbePiece, &begin, &end)) {
      for (long i = begin; i < end; i += kLanes) {
        prefetch(data + i + 512);
        V& sum = sums[i / kLanes % 4];
        sum = add(sum, load(data + i));
      }
    }
    float own = sum_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    __atomic_store(shared, &own, __ATOMIC_RELAXED);
  });
  return total;
}

// Each thread does `rounds` rounds of vector multiply-adds, one in each of the independent chains,
// with one load in each round. Returns the multiply-adds done, per lane, by all threads.
long probe_arithmetic(long rounds, int threads) {
  long done = 0;
  long* shared = &done;
  pm::parallel(threads, [=] {
    float data[kLanes] = {};
    V sums[kProbeChains];
    for (int i = 0; i < kProbeChains; ++i) sums[i] = splat(static_cast<float>(i));
    for (long round = 0; round < rounds; ++round) {
      const V value = load(data);
#pragma GCC unroll 24
      for (int i = 0; i < kProbeChains; ++i) sums[i] = fma(sums[i], value, sums[i]);
    }
    V total = zero();
    for (int i = 0; i < kProbeChains; ++i) total = add(total, sums[i]);
    // The sums are never negative, but the compiler does not know that and has to compute them.
    const long own = sum_lanes(total) > -1.0f ? rounds * kProbeChains * kLanes : 0;
    __atomic_fetch_add(shared, own, __ATOMIC_RELAXED);
  });
  return done;
}

}  // namespace
