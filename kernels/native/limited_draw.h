// Draws with limits (draw.h has those without): min_p, then top_k, then top_p. A first pass over
// the row records the highest of every kChunk / kLanes columns, which shows where columns that may
// be kept lie. These candidates are gathered, and limits.h finds which of them the limits leave
// out.
#pragma once

#include <math.h>
#include <stdlib.h>

#include "draw.h"
#include "limits.h"
#include "memory.h"

namespace {

constexpr long kChunk = kLanes * kLanes;  // columns, of which each lane records its highest
constexpr float kLightest = 0x1p-126f;    // the only lesser weight is 0, which is never drawn
// exponential() is monotonic but for its rounding. This bound is ample: a weight exceeds that of a
// higher value by no larger part of itself.
constexpr float kRounding = 0x1p-18f;

struct Limit {
  float min_p;  // 0: none
  long top_k;   // 0: none
  double top_p;  // 1: none

  bool is_none() const { return !(min_p > 0.0f) && top_k == 0 && !(top_p < 1.0); }
  bool is_top_p_alone() const { return !(min_p > 0.0f) && top_k == 0; }
};

// The columns of a row that may be kept, ascending, and their weights; ends_[block]: how many of
// them there are up to the end of that block. The memory is reused for the next row.
class Candidates {
 public:
  static long memory_floats(long width) {
    return chunks(width) * kLanes + 4 * (width + kLanes) + sum_blocks(width);
  }

  Candidates(float* memory, long width)
      : tops_(memory),
        weights_(tops_ + chunks(width) * kLanes),
        high_(weights_ + width + kLanes),
        low_(high_ + width + kLanes),
        columns_(reinterpret_cast<int32_t*>(low_ + width + kLanes)),
        ends_(columns_ + width + kLanes),
        top_count_(chunks(width) * kLanes) {}

  // Returns the highest value of a row; NaN if the row holds one. Fills tops_.
  float survey(const float* in, long width) {
    V peaks = splat(-INFINITY), trace = zero();
    for (long first = 0; first < width; first += kChunk) {
      const long end = width < first + kChunk ? width : first + kChunk;
      V best = splat(-INFINITY);
      for (long i = first; i < end; i += kLanes) {
        const int lanes = lanes_at(i, end);
        const V value = load_some(in + i, lanes);
        best = max(fill_from(value, lanes, -INFINITY), best);
        trace = fma(value, splat(0x1p-64f), trace);  // max() loses NaNs
      }
      store(tops_ + first / kLanes, best);
      peaks = max(best, peaks);
    }
    const float sum = sum_lanes(trace);
    return sum == sum ? max_lanes(peaks) : sum;
  }

  // Applies the limits to a row that was surveyed; what they leave out weighs 0.
  void keep(const Distribution& row, const Limit& limit) {
    weigh(tops_, top_count_, row.peak, row.temperature, tops_);
    const double whole = limit.is_top_p_alone() ? row.whole() : 0.0;
    gather(row, limit.is_top_p_alone() ? lightest(row, limit, whole) : lightest(limit));
    if (limit.top_k > 0 && limit.top_k < count_) {
      cut(weights_, count_, highest(weights_, count_, limit.top_k));
    }
    if (limit.top_p < 1.0) {
      const double all = limit.is_top_p_alone() ? whole : sum_of(weights_, count_);
      cut(weights_, count_, edge_of<true>(weights_, count_, limit.top_p * all, high_, low_));
    }
  }

  void sum(double* sums, long blocks) const {
    for (long block = 0; block < blocks; ++block) {
      sums[block] = sum_of(weights_ + start(block), ends_[block] - start(block));
    }
  }

  long column(const Aim& aim) const {
    const long first = start(aim.block);
    return columns_[first + aim.place(weights_ + first, ends_[aim.block] - first)];
  }

  void spread(float* weights) const {
    for (long i = 0; i < count_; ++i) weights[columns_[i]] = weights_[i];
  }

 private:
  static long chunks(long width) { return (width + kChunk - 1) / kChunk; }
  long start(long block) const { return block ? ends_[block - 1] : 0; }

  Edge highest(const float* values, long count, long kept) const {
    return edge_of<false>(values, count, static_cast<double>(kept), high_, low_);
  }

  // A lower bound of the weights that min_p and top_k keep: tops_ alone has top_k weights of at
  // least this much.
  float lightest(const Limit& limit) const {
    const float least = fmaxf(kLightest, fminf(limit.min_p, 1.0f));
    if (limit.top_k < 1 || limit.top_k >= top_count_) return least;
    return fmaxf(least, highest(tops_, top_count_, limit.top_k).lowest);
  }

  // The same for top_p alone: columns that weigh no more than an even share of the sum that it
  // leaves out are left out, all of them.
  float lightest(const Distribution& row, const Limit& limit, double whole) const {
    const double share = (1.0 - limit.top_p) * whole / static_cast<double>(row.width);
    return fmaxf(kLightest, static_cast<float>(share) * (1.0f - kRounding));
  }

  void gather(const Distribution& row, float lightest) {
    const V peak = splat(row.peak), heat = splat(1.0f / row.temperature);
    const float nearly = lightest * (1.0f - kRounding);
    count_ = 0;
    for (long first = 0; first < row.width; first += kChunk) {
      const long end = row.width < first + kChunk ? row.width : first + kChunk;
      const bool any = at_least(load(tops_ + first / kLanes), nearly) != 0;
      for (long i = first; any && i < end; i += kLanes) {
        const int lanes = lanes_at(i, end);
        const V weight = weigh(load_some(row.in + i, lanes), peak, heat);
        const unsigned heavy = at_least(weight, lightest) & first_lanes(lanes);
        pack_count(columns_ + count_, static_cast<int32_t>(i), heavy);
        count_ += pack(weights_ + count_, weight, heavy);
      }
      ends_[first / PM_SUM_BLOCK] = static_cast<int32_t>(count_);
    }
  }

  float *tops_, *weights_, *high_, *low_;
  int32_t *columns_, *ends_;
  long top_count_, count_ = 0;
};

inline long draw_limited(const float* in, long width, float temperature, const Limit& limit,
                         double uniform, float* memory, float* weights, double* sums) {
  const long blocks = sum_blocks(width);
  Candidates candidates(memory, width);
  const Distribution row = {in, width, candidates.survey(in, width), temperature};
  if (weights) memset(weights, 0, sizeof(float) * static_cast<size_t>(width));
  if (!(fabsf(row.peak) < INFINITY)) {
    for (long block = 0; block < blocks; ++block) sums[block] = NAN;
    return 0;
  }
  candidates.keep(row, limit);
  candidates.sum(sums, blocks);
  if (weights) candidates.spread(weights);
  return candidates.column(Aim(sums, blocks, uniform));
}

long softmax_draw(const float* x, long x_stride, long x_rows, const PmDraws* draws, long width,
                  float* weights, double* sums, int64_t* tokens, int threads) {
  const PmDraws own = *draws;
  for (long i = 0; i < own.count; ++i) {
    if (own.rows[i] < 0 || own.rows[i] >= x_rows) return 1 + i;
  }
  const long blocks = sum_blocks(width);
  const size_t floats = static_cast<size_t>(Candidates::memory_floats(width));
  float* memory = nullptr;
  if (own.min_p) {
    memory = pm::take<float>(floats * static_cast<size_t>(threads));
  }
  for_rows(own.count, width * kDrawWork, threads, [=](long i) {
    const float* in = x + own.rows[i] * x_stride;
    float* to = weights ? weights + i * width : nullptr;
    Limit limit = {0.0f, 0, 1.0};
    if (own.min_p) {
      const bool counted = own.top_k[i] > 0 && own.top_k[i] < width;
      limit = {own.min_p[i], counted ? own.top_k[i] : 0, own.top_p[i]};
    }
    tokens[i] = limit.is_none()
        ? draw_free(in, width, own.temperatures[i], own.uniforms[i], to, sums + i * blocks)
        : draw_limited(in, width, own.temperatures[i], limit, own.uniforms[i],
                       memory + floats * static_cast<size_t>(pm::thread_index()), to,
                       sums + i * blocks);
  });
  free(memory);
  return 0;
}

}  // namespace
