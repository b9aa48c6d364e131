// Steps that follow one another without anybody being asked: what a row draws is its next token.
#include <math.h>

#include "clock.h"
#include "pagemesh_native.h"
#include "parallel.h"

namespace {

constexpr long kNoColumn = -1;
constexpr long kAloneColumns = 1L << 16;  // what one thread looks at sooner than others wake

// The first of the highest; kNoColumn when that is no finite number or there is any that is none.
long highest_column(const float* row, long width) {
  float best = -INFINITY;
  long found = 0;
  for (long i = 0; i < width; ++i) {
    if (row[i] <= best) continue;
    if (isnan(row[i])) return kNoColumn;
    best = row[i];
    found = i;
  }
  return isfinite(best) ? found : kNoColumn;
}

// Tokens of all rows into `to`; false when one has none.
bool draw_rows(const PmRun& run, long step, int64_t* to, int threads) {
  const long rows = run.batch->rows, width = run.decoder->vocab;
  if (!run.draws) {
    pm::parallel(rows * width <= kAloneColumns ? 1 : threads, [&] {
      for (long row = pm::thread_index(); row < rows; row += pm::thread_count()) {
        to[row] = highest_column(run.logits + row * width, width);
      }
    });
    for (long row = 0; row < rows; ++row) {
      if (to[row] == kNoColumn) return false;
    }
    return true;
  }
  PmDraws draws = *run.draws;
  draws.uniforms += step * rows;
  const long blocks = (width + PM_SUM_BLOCK - 1) / PM_SUM_BLOCK;
  if (pm_softmax_draw(run.logits, width, rows, &draws, width, nullptr, run.sums, to, threads)) {
    return false;
  }
  for (long row = 0; row < rows; ++row) {
    double sum = 0.0;
    for (long block = 0; block < blocks; ++block) sum += run.sums[row * blocks + block];
    if (!isfinite(sum)) return false;
  }
  return true;
}

bool is_stop(const PmRun& run, long row, int64_t token) {
  for (long i = run.stop_indptr[row]; i < run.stop_indptr[row + 1]; ++i) {
    if (run.stops[i] == token) return true;
  }
  return false;
}

bool is_wanted_elsewhere(const PmRun& run) {
  if (__atomic_load_n(run.end, __ATOMIC_ACQUIRE)) return true;
  for (long i = 0; i < run.waiting_count; ++i) {
    if (__atomic_load_n(run.waiting[i], __ATOMIC_ACQUIRE)) return true;
  }
  return false;
}

bool leases_stand(const PmRun& run) {
  const long rows = run.batch->rows;
  pm_words_same(run.lease_words, run.lease_word_count, run.lease_slots, run.leases, rows,
                run.same);
  for (long row = 0; row < rows; ++row) {
    if (!run.same[row]) return false;
  }
  return true;
}

// Whether every row has a slot for one more token; then the batch is the next step's.
bool advance(const PmRun& run, const int64_t* drawn) {
  const PmRows& batch = *run.batch;
  const long size = run.pages[0]->page_size;
  for (long row = 0; row < batch.rows; ++row) {
    const int32_t* table = batch.table_indptr + batch.sequence[row];
    if ((batch.position[row] + 1) / size >= table[1] - table[0]) return false;
  }
  for (long row = 0; row < batch.rows; ++row) {
    const int32_t position = ++run.position[row];
    const long page = batch.tables[batch.table_indptr[batch.sequence[row]] + position / size];
    run.tokens[row] = drawn[row];
    run.slots[row] = page * size + position % size;
  }
  return true;
}

}  // namespace

extern "C" PM_EXPORT long pm_decoder_run(const PmRun* given, int threads) {
  const PmRun& run = *given;
  const long rows = run.batch->rows;
  const double began_us = pm::now_us();
  double since_us = began_us;
  long done = 0;
  while (true) {
    const long bad = pm_decoder_step(run.decoder, run.pages, run.batch, run.workspace, run.hidden,
                                     run.logits, nullptr, threads);
    if (bad) return done ? done : -bad;
    int64_t* drawn = run.drawn + done * rows;
    const bool last = ++done == run.step_count || is_wanted_elsewhere(run) ||
                      pm::now_us() - began_us >= run.for_us || !leases_stand(run) ||
                      !draw_rows(run, done - 1, drawn, threads);
    bool stops = last;
    for (long row = 0; row < rows && !stops; ++row) stops = is_stop(run, row, drawn[row]);
    if (!stops) stops = !advance(run, drawn);
    const double at_us = pm::now_us();
    run.took_us[done - 1] = at_us - since_us;
    since_us = at_us;
    if (stops) return done;
  }
}
