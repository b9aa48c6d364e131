// Consecutive steps without returning to the caller: the token that a row draws is its next input.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "drafts.h"
#include "memory.h"
#include "pagemesh_native.h"
#include "parallel.h"

namespace {

constexpr long kNoColumn = -1;
constexpr int64_t kNoSlot = -1;
constexpr long kAloneColumns = 1L << 16;  // one thread scans this many sooner than others wake

// The first of the highest columns; kNoColumn if the highest is not finite or the row holds a NaN.
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

long smaller(long a, long b) { return a < b ? a : b; }

// An array, at first of zeros, that lives as long as the run.
template <typename T>
struct Kept {
  T* const at;
  explicit Kept(long count) : at(pm::take<T>(static_cast<size_t>(count))) {
    memset(static_cast<void*>(at), 0, sizeof(T) * static_cast<size_t>(count));
  }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  ~Kept() { free(at); }
  T& operator[](long i) const { return at[i]; }
};

// The rows of a step. Those of a sequence lie together: the token that it drew last, then its
// drafts. Sequence i is row i of the batch with which the run began.
class Rows {
 public:
  explicit Rows(const PmRun& run)
      : run_(run),
        sequences_(run.batch->rows),
        rows_max_(run.drafts && run.drafts->rows_max > sequences_ ? run.drafts->rows_max
                                                                   : sequences_),
        left_(run.token_count), batch_(*run.batch), tokens_(rows_max_), slots_(rows_max_),
        wanted_(rows_max_), sequence_(rows_max_), position_(rows_max_), first_(sequences_ + 1),
        counts_(run.drawn_count), guesses_(sequences_), chances_(sequences_) {
    for (long row = 0; row < rows_max_; ++row) wanted_[row] = row;
    batch_.tokens = tokens_.at, batch_.slots = slots_.at, batch_.wanted = wanted_.at;
    batch_.sequence = sequence_.at, batch_.position = position_.at;
  }

  const PmRows& batch() const { return batch_; }
  long rows_max() const { return rows_max_; }
  long first(long i) const { return first_[i]; }
  long drafts(long i) const { return first_[i + 1] - first_[i] - 1; }
  int64_t token(long row) const { return tokens_[row]; }
  int64_t guess(long i) const { return guesses_[i]; }
  float* chance(long i) const { return chances_[i]; }  // the estimate that it is right
  long sequence(long row) const { return sequence_[row]; }
  // The index, among the tokens that its sequence draws in the run, of the one that a row draws.
  long ordinal(long row) const {
    const long i = sequence_[row];
    return counts_[i] + row - first_[i];
  }

  // Lays out the next step. The room for drafts is shared evenly.
  void lay() {
    long rows = 0;
    for (long i = 0; i < sequences_; ++i) {
      const long at = run_.batch->position[i] + counts_[i];
      first_[i] = rows;
      put(rows++, i, at, next_token(i));
      if (!run_.drafts) continue;
      const long room = (rows_max_ - rows) / (sequences_ - i);  // the others' own rows set aside
      const long drafts = draft(i, smaller(room, room_behind(i, at)), tokens_.at + rows);
      for (long j = 1; j <= drafts; ++j, ++rows) put(rows, i, at + j, tokens_[rows]);
    }
    first_[sequences_] = batch_.rows = batch_.wanted_count = rows;
  }

  // Whether sequence i may go on after `drawn` more tokens: its next one has a slot and a position.
  bool has_place(long i, long drawn) const {
    return run_.batch->position[i] + counts_[i] + drawn < place_count(i);
  }

  // How many more tokens each sequence may draw. When a sequence draws several in a step, as many
  // are used up for all sequences: so all end together, and a plan needs no number for each.
  long left() const { return left_; }
  void use_up(long count) { left_ -= count; }

  // Appends `count` drawn tokens to sequence i.
  void take(long i, const int64_t* drawn, long count) {
    memcpy(run_.drawn + i * run_.token_count + counts_[i], drawn,
           sizeof(int64_t) * static_cast<size_t>(count));
    counts_[i] += count;
    if (!run_.drafts) return;
    const PmDrafts& drafts = *run_.drafts;
    uint32_t* history = drafts.history + i * drafts.history_stride;
    for (long j = 0; j < count; ++j) {
      history[drafts.history_count[i]++] = static_cast<uint32_t>(drawn[j]);
    }
  }

 private:
  int64_t next_token(long i) const {
    return counts_[i] ? run_.drawn[i * run_.token_count + counts_[i] - 1] : run_.batch->tokens[i];
  }

  long place_count(long i) const {
    const int32_t* table = batch_.table_indptr + i;
    const long slots = (table[1] - table[0]) * run_.pages[0]->page_size;
    return smaller(slots, run_.decoder->positions);
  }

  // How many drafts may follow position `at`: each needs a slot, and counts among the tokens left.
  long room_behind(long i, long at) const { return smaller(place_count(i) - at - 1, left_ - 1); }

  // Writes drafts of sequence i to `to`, at most `room`, and returns how many. Records the first
  // guess whether it is worth a row or not.
  long draft(long i, long room, int64_t* to) {
    const PmDrafts& drafts = *run_.drafts;
    const uint32_t* history = drafts.history + i * drafts.history_stride;
    const long count = drafts.history_count[i];
    const pm::Match match = pm::longest_match(history, count);
    guesses_[i] = kNoColumn;
    if (!match.length) return 0;
    guesses_[i] = history[match.end];
    chances_[i] = drafts.chances + i * PM_CHANCES + match.is_long();
    if (*chances_[i] <= 0.0f) *chances_[i] = pm::kFirstChances[match.is_long()];
    const long wanted =
        smaller(room, pm::wanted_drafts(*chances_[i], sequences_, drafts.each_max));
    pm::draft(history, count, match, wanted, to);
    return wanted;
  }

  // A row for whose position the table has no page gets kNoSlot, and the step refuses it.
  void put(long row, long i, long at, int64_t token) {
    const long size = run_.pages[0]->page_size;
    const int32_t* table = batch_.table_indptr + i;
    const bool has_page = at >= 0 && at / size < table[1] - table[0];
    tokens_[row] = token;
    slots_[row] = has_page ? batch_.tables[table[0] + at / size] * size + at % size : kNoSlot;
    sequence_[row] = static_cast<int32_t>(i);
    position_[row] = static_cast<int32_t>(at);
  }

  const PmRun& run_;
  const long sequences_, rows_max_;
  long left_;
  PmRows batch_;
  Kept<int64_t> tokens_, slots_, wanted_;
  Kept<int32_t> sequence_, position_;
  Kept<long> first_;
  int64_t* const counts_;
  Kept<int64_t> guesses_;  // of the next token of each sequence, or kNoColumn
  Kept<float*> chances_;
};

// Draws a token for each row of a step, or kNoColumn if the logits allow none. A warm row is one
// with a temperature; the others take the highest column.
class Draws {
 public:
  explicit Draws(const PmRun& run, long rows_max)
      : run_(run), index_(rows_max), top_k_(rows_max), columns_(rows_max), uniforms_(rows_max),
        top_p_(rows_max), temperatures_(rows_max), min_p_(rows_max), tokens_(rows_max) {}

  const int64_t* tokens() const { return tokens_.at; }

  void draw(const Rows& rows, int threads) {
    const long count = rows.batch().rows, width = run_.decoder->vocab;
    long warm = 0;
    for (long row = 0; row < count; ++row) {
      if (is_warm(rows.sequence(row))) note_warm(rows, row, warm++);
    }
    if (warm) draw_warm(warm, count, width, threads);
    if (warm == count) return;
    pm::parallel((count - warm) * width <= kAloneColumns ? 1 : threads, [&] {
      for (long row = pm::thread_index(); row < count; row += pm::thread_count()) {
        if (is_warm(rows.sequence(row))) continue;
        tokens_[row] = highest_column(run_.logits + row * width, width);
      }
    });
  }

 private:
  bool is_warm(long sequence) const { return run_.draws && run_.draws->temperatures[sequence] > 0; }

  // Enters a row at `place` of the draw, with the sampling parameters of its sequence.
  void note_warm(const Rows& rows, long row, long place) {
    const PmDraws& of = *run_.draws;
    const long i = rows.sequence(row);
    index_[place] = row;
    uniforms_[place] = of.uniforms[rows.ordinal(row) * of.count + i];
    temperatures_[place] = of.temperatures[i];
    if (!of.min_p) return;
    min_p_[place] = of.min_p[i], top_k_[place] = of.top_k[i], top_p_[place] = of.top_p[i];
  }

  void draw_warm(long warm, long count, long width, int threads) {
    const bool limited = run_.draws->min_p != nullptr;
    const PmDraws draws{index_.at, temperatures_.at, uniforms_.at, limited ? min_p_.at : nullptr,
                        limited ? top_k_.at : nullptr, limited ? top_p_.at : nullptr, warm};
    pm_softmax_draw(run_.logits, width, count, &draws, width, nullptr, run_.sums, columns_.at,
                    threads);
    const long blocks = (width + PM_SUM_BLOCK - 1) / PM_SUM_BLOCK;
    for (long place = 0; place < warm; ++place) {
      double sum = 0.0;
      for (long block = 0; block < blocks; ++block) sum += run_.sums[place * blocks + block];
      tokens_[index_[place]] = isfinite(sum) ? columns_[place] : kNoColumn;
    }
  }

  const PmRun& run_;
  Kept<int64_t> index_, top_k_, columns_;  // of rows that have a temperature
  Kept<double> uniforms_, top_p_;
  Kept<float> temperatures_, min_p_;
  Kept<int64_t> tokens_;
};

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

// Whether sequence i goes on after `token`, which follows `drawn` others of this step, without a
// decision by the caller.
bool goes_on(const PmRun& run, const Rows& rows, long i, long drawn, int64_t token) {
  return token != kNoColumn && drawn + 1 < rows.left() && !is_stop(run, i, token) &&
         rows.has_place(i, drawn + 1);
}

// Updates the estimate for the guesses of sequence i, of whose drafts `right` were right.
void learn(const Rows& rows, long i, int64_t drawn, long right) {
  if (rows.guess(i) == kNoColumn) return;
  if (!rows.drafts(i)) right = rows.guess(i) == drawn;  // a guess that had no row
  pm::learn(rows.chance(i), right, right < rows.drafts(i) || !right);
}

// Writes to `right` how many drafts of each sequence equal the token drawn by the row before them.
// Returns whether the run may go on.
bool verify(const PmRun& run, const Rows& rows, const int64_t* drawn, long* right) {
  bool all_go_on = true;
  for (long i = 0; i < run.batch->rows; ++i) {
    const long first = rows.first(i);
    long count = 0;
    while (goes_on(run, rows, i, count, drawn[first + count]) && count < rows.drafts(i) &&
           rows.token(first + count + 1) == drawn[first + count]) {
      ++count;
    }
    right[i] = count;
    if (run.drafts) learn(rows, i, drawn[first], count);
    all_go_on = all_go_on && goes_on(run, rows, i, count, drawn[first + count]);
  }
  return all_go_on;
}

// Appends to every sequence its drafts that were right and the token drawn after them.
void take(const PmRun& run, Rows* rows, const int64_t* drawn, const long* right) {
  long most = 0;
  for (long i = 0; i < run.batch->rows; ++i) {
    const long count = right[i] + 1;
    most = count > most ? count : most;
    run.drafted_count[i] += rows->drafts(i);
    rows->take(i, drawn + rows->first(i), count);
  }
  rows->use_up(most);
}

// A PmBad with the index of the sequence instead of that of its row.
long of_sequence(const Rows& rows, long bad) {
  const long row = bad & 0xFFFFFFFFL;
  return bad - row + rows.sequence(row);
}

// Does steps until the caller has to decide. Returns how many, or minus the PmBad of a step.
long run_steps(const PmRun& run, int threads) {
  Rows rows(run);
  Draws draws(run, rows.rows_max());
  Kept<long> right(run.batch->rows);
  const double began_us = pm::now_us();
  double since_us = began_us;
  long done = 0;
  while (true) {
    rows.lay();
    const long bad = pm_decoder_step(run.decoder, run.pages, &rows.batch(), run.workspace,
                                     run.hidden, run.logits, nullptr, threads);
    if (bad) return -of_sequence(rows, bad);
    draws.draw(rows, threads);
    const bool all_go_on = verify(run, rows, draws.tokens(), right.at);
    take(run, &rows, draws.tokens(), right.at);
    const double at_us = pm::now_us();
    run.took_us[done++] = at_us - since_us;
    since_us = at_us;
    if (!all_go_on || !leases_stand(run) || is_wanted_elsewhere(run) ||
        at_us - began_us >= run.for_us) {
      return done;
    }
  }
}

}  // namespace

extern "C" PM_EXPORT long pm_decoder_run(const PmRun* run, int threads) {
  long done = 0;
  pm::with_team(threads, [&] { done = run_steps(*run, threads); });
  return done;
}
