// The library's C interface. Pointers are not owned; sizes are in elements unless named _bytes.
// Functions that check their input return 0, or 1 + the index of the first bad item.
#pragma once

#include <cstdint>

#define PM_EXPORT __attribute__((visibility("default")))

extern "C" {

// --- Which code runs ---------------------------------------------------------------------------
enum PmLevel { PM_PORTABLE = 0, PM_AVX2 = 1, PM_AVX512 = 2, PM_AVX512_BF16 = 3, PM_AMX = 4 };

int pm_abi_version(void);
int pm_best_level(void);      // the highest that this CPU and build can run
int pm_set_level(int level);  // returns 0, or 1 if this CPU or build cannot run it
int pm_level(void);
// Takes the entry points of the OpenMP runtime to use (parallel.h): GOMP_parallel,
// omp_get_thread_num, omp_get_num_threads, omp_get_num_procs.
void pm_lend_threads(void* parallel, void* index, void* count, void* cores);
// Pins the threads of all regions that the calling thread begins from now on: thread i, the caller
// being thread 0, runs on cores[i] alone. Threads from `count` on may run on any core, so a count
// of 0 unpins all of them. Not to be called inside a region. Regions that other threads begin are
// not affected.
void pm_bind_threads(const int* cores, int count);

// --- Page headers (see pagemesh/wire/pool_format.py) -----------------------------------------
// The check word of a header: over all its words but the state word and itself, and of the word
// with the expiry only whether it is 0.
uint64_t pm_check_word(const uint64_t* header, long header_words);
// What the headers of a list of pages have in common. Identities count up from page to page, and so
// do sequences unless they are given one by one; each page's parent is the page before it. An
// identity of 0 means none, and is not counted up.
typedef struct {
  uint64_t* table;
  long header_words;
  long page_count;  // of the pool
  uint64_t state;
  uint64_t first_sequence;
  uint64_t first_identity;
  uint64_t parent;  // of the first page
  uint64_t writer;
  uint64_t root;
  long token_count;  // in each header
  uint64_t until_ms;  // expiry of committed pages; 0: none
  uint32_t one_extent[2];  // first page, page count
} PmHeaderRun;
// Writes the headers of the pages of `extents`, pairs of (first page, page count), one after the
// other: INVALID, body, check word, state (release). If `extents` is null, here and in the next two
// calls, the run's own extent is used. `sequences`: one per page, or null. `tokens`: token_count
// per page. Returns 0; -1 if the tokens do not fit in a header; 1 + the index of the first extent
// that is not in the pool. Unless it returns 0, nothing is written.
long pm_headers_write(const PmHeaderRun* run, const uint32_t* extents, long extent_count,
                      const uint64_t* sequences, const uint32_t* tokens);
// Writes only the state words (release). Bodies stay, except that the tokens of a page with an
// expiry are wiped before the page becomes FREE.
long pm_headers_mark(const PmHeaderRun* run, const uint32_t* extents, long extent_count,
                     const uint64_t* sequences);
// Moves the expiry of COMMITTED pages to the run's until_ms, with one store each. A later expiry is
// kept; pages without an expiry, or in another state, are left alone.
long pm_headers_keep(const PmHeaderRun* run, const uint32_t* extents, long extent_count);
// Returns how many of `pages`, from the first on, are HELD or COMMITTED with a sequence of at most
// `granted_at`. Waits for a bounded time for a header that is being rewritten under such a
// sequence.
long pm_headers_fresh(const uint64_t* table, long header_words, const uint32_t* pages, long count,
                      long page_count, uint64_t granted_at);
// Copies each of `count` headers, from page `first` on, consistently to `out`. torn[i] = 1 if the
// header is INVALID, its check word does not match, its expiry is damaged, or it kept changing
// during the copy. The body of a FREE page means nothing and is not checked.
void pm_headers_scan(const uint64_t* table, long header_words, long first, long count,
                     uint64_t* out, uint8_t* torn);

// --- Single words -------------------------------------------------------------------------------
void pm_word_store(uint64_t* word, uint64_t value);  // release
uint64_t pm_word_load(const uint64_t* word);         // acquire
// A word on which processes wait. pm_word_advance increments it (release) and wakes all waiters;
// pm_word_await sleeps while it is `seen`, for timeout_us at most, and may return early.
void pm_word_advance(uint32_t* word);
void pm_word_await(const uint32_t* word, uint32_t seen, long timeout_us);
// same[i] = 1 when words[slots[i]] == expected[i] (acquire).
void pm_words_same(const uint64_t* words, long word_count, const uint32_t* slots,
                   const uint64_t* expected, long count, uint8_t* same);

// --- Kernels (contracts: pagemesh/kernels/<operation>) -----------------------------------------
// The element type of a packed weight's panels (weights.h).
enum PmWeightType { PM_WEIGHT_FLOAT32 = 0, PM_WEIGHT_INT8 = 1, PM_WEIGHT_BFLOAT16 = 2,
                    PM_WEIGHT_FLOAT16 = 3, PM_WEIGHT_SLIM_BFLOAT16 = 4 };

// Packs `weight`, [n][k] of elements of `item_bytes` (2 or 4) with `row_stride` in elements, into
// panels of 16 columns, [panels][k][16]; missing columns become 0.
void pm_linear_pack(const void* weight, long row_stride, void* packed, long n, long k,
                    long item_bytes);
// Packs bfloat16 weights as PM_WEIGHT_SLIM_BFLOAT16 (slim_layout.h). Returns 0, or 1 if that format
// cannot hold them; the contents of `packed` are then undefined. If `packed` is null it only
// checks.
int pm_linear_pack_slim(const uint16_t* weight, long row_stride, void* packed, long n, long k,
                        int threads);
void pm_rms_norm(const float* x, long x_stride, const float* weight, float* out, long out_stride,
                 long rows, long width, float epsilon, int threads);
void pm_rope(float* x, long row_stride, const float* cosine, const float* sine, long rows,
             long heads, long head_dim, long rotary_dim, int threads);
void pm_silu_mul(const float* gate_up, long in_stride, float* out, long out_stride, long rows,
                 long width, int threads);
void pm_log_softmax(const float* x, long x_stride, float* out, long out_stride, long rows,
                    long width, int threads);
// The weights of a softmax are summed in blocks of this many columns.
enum { PM_SUM_BLOCK = 1024 };
// How to draw a column from each of `count` rows; row i is rows[i] of x. A column's weight is
// exp((x - highest) / temperature). The column drawn is the first whose running sum of weights
// exceeds uniforms[i] times the whole sum. Limits set weights to 0, in this order: min_p keeps
// those of at least min_p; top_k keeps the top_k highest; top_p keeps, from the highest down, those
// before which there is less than top_p of the sum that is left. At an edge the lowest of equal
// columns are kept; the highest weight is always kept. No limit: min_p 0, top_k 0 or at least the
// width, top_p 1. All three limits are given, for all rows, or all three are null.
typedef struct {
  const int64_t* rows;
  const float* temperatures;
  const double* uniforms;
  const float* min_p;
  const int64_t* top_k;
  const double* top_p;
  long count;
} PmDraws;
// `weights`: [count][width], or null; 0 for columns that limits leave out. `sums`: [count][blocks],
// the sum of each block's weights. If a row holds a NaN or its highest value is not finite, its
// sums add up to NaN and its column is 0. Returns 0, or 1 + the index of the first row that is not
// in x; then nothing is written.
long pm_softmax_draw(const float* x, long x_stride, long x_rows, const PmDraws* draws, long width,
                     float* weights, double* sums, int64_t* tokens, int threads);

// What to score in each of `count` rows; row i is rows[i] of x: the log-softmax of `column_count`
// given columns, and of the top_counts[i] highest, or of all if there are fewer.
typedef struct {
  const int64_t* rows;
  const int64_t* columns;     // [count][column_count]
  const int64_t* top_counts;
  long column_count, count;
} PmScored;
// `scores`: [count][column_count]. `top_columns` and `tops`: [count][top_stride], the highest first
// and of equals the lowest column first; for a row that holds a NaN, the first columns. Scores have
// the bits of pm_log_softmax. Returns 0, or 1 + the index of the first row that is not in x or has
// a column that is not in the row; then nothing is written.
long pm_top_scores(const float* x, long x_stride, long x_rows, long width, const PmScored* scored,
                   long top_stride, float* scores, int64_t* top_columns, float* tops,
                   int threads);

// Edits of a row, in this order: `masked` columns become -INFINITY; biases[i] is added to column
// biased[i]; in `repeated` columns values above 0 are divided by `repetition`, others multiplied by
// it; frequency * counts[i], then `presence`, is subtracted from column counted[i]. Only `masked`
// may name a column twice. Masked and biased columns that are not in the row are skipped; repeated
// and counted columns must be in it, and are not checked.
typedef struct {
  const int64_t* masked;
  const int64_t* biased;
  const float* biases;
  const uint32_t* repeated;
  const uint32_t* counted;
  const float* counts;
  long masked_count, biased_count, repeated_count, counted_count;
  float repetition, frequency, presence;
} PmEdits;
// Applies edits[i] to row rows[i] of x, in place; no row twice. The values before go to `saved`,
// from saved_indptr[i] on, with one place for each column that edits[i] lists. Returns 0, or 1 +
// the index of the first row that is not in x; then nothing is written.
long pm_edit_rows(float* x, long x_stride, long x_rows, long width, const int64_t* rows,
                  const PmEdits* const* edits, const int64_t* saved_indptr, long count,
                  float* saved, int threads);
// Undoes pm_edit_rows with the same arguments.
void pm_restore_rows(float* x, long x_stride, long width, const int64_t* rows,
                     const PmEdits* const* edits, const int64_t* saved_indptr, long count,
                     const float* saved, int threads);

// The element type of K and V in pages (kv_types.h); codes of int8 and e4m3 go with scales.
enum PmKvType { PM_KV_FLOAT32 = 0, PM_KV_FLOAT16 = 1, PM_KV_BFLOAT16 = 2, PM_KV_INT8 = 3,
                PM_KV_E4M3 = 4 };

// Where K and V of one layer lie in a pool; strides and offsets in codes unless named _bytes.
struct PmPages {
  void* base;               // this layer's K in the first page
  long page_stride;         // from page to page
  long value_offset;        // from a head's K to its V
  long head_stride;         // from KV head to KV head, for K and V alike
  long page_count;
  long page_size;           // slots
  long kv_heads;
  long head_dim;
  long kv_type;             // PmKvType
  long scale_offset_bytes;  // from a head's K to its slots' scales; from its V likewise
};

long pm_kv_write(const PmPages* pages, const float* k, long k_stride, const float* v,
                 long v_stride, const int64_t* slots, long rows, int threads);
// Reads K and V of positions [first, first + count) of one sequence: [kv_heads][count][head_dim].
long pm_kv_gather(const PmPages* pages, const int32_t* table, long table_pages, long first,
                  long count, float* k, float* v, int threads);
// soft_cap: INFINITY for none. window_tokens: LONG_MAX for none; pages before it are not read.
long pm_paged_attention(const PmPages* pages, const float* q, long q_stride, float* out,
                        long out_stride, long rows, long q_heads, const int32_t* tables,
                        const int32_t* table_indptr, long sequences, const int32_t* row_sequence,
                        const int32_t* row_position, float scale, float soft_cap,
                        long window_tokens, int threads);
long pm_page_copy(uint8_t* base, long page_bytes, long page_count, const uint32_t* sources,
                  const uint32_t* targets, long count, int threads);

struct PmMatrix {
  const void* panels;
  const float* bias;  // or null
  long n, k;
  long weight_type;  // PmWeightType
  long rounds_rows;  // to bfloat16; ignored for other weights than (slim) bfloat16 and int8
};

void pm_linear(const float* x, long x_stride, const PmMatrix* matrix, float* out, long out_stride,
               long rows, int row_invariant, int threads);

// --- A whole forward pass (contract: pagemesh/kernels/decoder_step) ---------------------------
struct PmLayer {
  const float* attention_norm;
  const float* query_norm;  // or null, like key_norm
  const float* key_norm;
  const float* mlp_norm;
  PmMatrix qkv, output, gate_up, down;
};

struct PmDecoder {
  const PmLayer* layers;
  const void* embedding;  // [vocab][hidden]
  const float* norm;
  const float* cosine;  // [positions][head_dim / 2]
  const float* sine;
  PmMatrix head;
  long layer_count, hidden, heads, kv_heads, head_dim, mlp, vocab, positions;
  float norm_epsilon, attention_scale;
  long row_invariant;   // a row's bits do not depend on the other rows
  long embedding_type;  // PmWeightType: float32, bfloat16 or float16
};

// A ragged batch, see pagemesh/kernels/batch.py. `wanted`: the rows, ascending, whose results are
// wanted; the last layer goes on with these alone.
struct PmRows {
  const int64_t* tokens;
  const int64_t* slots;
  const int32_t* sequence;
  const int32_t* position;
  const int32_t* tables;
  const int32_t* table_indptr;
  const int64_t* wanted;
  long rows, sequences, wanted_count;
};

enum PmPhase { PM_PRODUCTS, PM_ATTENTION, PM_ROWS, PM_PHASES };
// What pm_decoder_step returns for bad input, plus the index of the row (for PM_BAD_WANTED the
// index in `wanted`); then nothing is written.
enum PmBad : long {
  PM_BAD_TOKEN = 1L << 32,
  PM_BAD_POSITION = 2L << 32,
  PM_BAD_SLOT = 3L << 32,
  PM_BAD_WANTED = 4L << 32,
  PM_BAD_TABLE = 5L << 32,
};

// Size, in floats, of the workspace for a step of `rows` rows.
long pm_decoder_workspace(const PmDecoder* decoder, long rows, int threads);
// `pages`: one per layer; the slots of all rows are written. `workspace`: aligned to 64 bytes.
// `hidden`: [wanted][hidden], the last norm's result. `logits`: [wanted][vocab], or null.
// `phase_us`: [PM_PHASES], added to, or null. Returns 0 or a PmBad.
long pm_decoder_step(const PmDecoder* decoder, const PmPages* const* pages, const PmRows* batch,
                     float* workspace, float* hidden, float* logits, double* phase_us,
                     int threads);

#define PM_CHANCES 2  // after a short match and after a long one
// Draft tokens: guessed from the context (drafts.h), and verified by the step that computes them.
struct PmDrafts {
  uint32_t* history;  // [sequences][history_stride]: tokens so far, the batch's token last; MUTATED
  long history_stride;
  int64_t* history_count;  // [sequences]; with room for PmRun.token_count more; MUTATED
  float* chances;          // [sequences][PM_CHANCES]: estimates that a guess is right; 0: none yet
  long each_max;           // drafts of a sequence in a step
  long rows_max;           // rows of a step, drafts included
};

// Consecutive steps; each sequence continues with the token that it drew (contract: decoder_step).
struct PmRun {
  const PmDecoder* decoder;
  const PmPages* const* pages;
  const PmRows* batch;  // of the first step: one row per sequence, all of them wanted
  float* workspace;         // this and the next two: for the most rows that a step may have
  float* hidden;
  float* logits;
  const PmDrafts* drafts;   // or null
  // uniforms: [token_count][sequences]. Null, or a temperature of 0: the first of the highest
  // logits is taken.
  const PmDraws* draws;
  double* sums;             // [rows of a step][blocks]
  const int64_t* stops;     // tokens; of row i: [stop_indptr[i], stop_indptr[i + 1])
  const int64_t* stop_indptr;
  const uint64_t* lease_words;  // checked after each step, see pm_words_same
  long lease_word_count;
  const uint32_t* lease_slots;
  const uint64_t* leases;
  uint8_t* same;
  const uint32_t* end;             // if not 0, no further step begins
  const uint64_t* const* waiting;  // words; one that is not 0: a process waits for the cores
  long waiting_count;
  long token_count;        // the most tokens drawn for a sequence
  double for_us;           // after this time no further step begins
  int64_t* drawn;          // [sequences][token_count]; -1: a NaN or no finite maximum in the logits
  int64_t* drawn_count;    // [sequences]; this and the next begin at 0
  int64_t* drafted_count;  // [sequences]: drafts computed, right or wrong
  double* took_us;         // [token_count]: the duration of each step
};
// Returns how many steps were done, at least one, or minus the PmBad of a step, with the index of
// the sequence. A run ends early if the caller has to decide: a sequence drew a stop token or no
// token, has no slot for its next one, or has lost its lease.
long pm_decoder_run(const PmRun* run, int threads);

// --- Limits of the machine (for benchmarks) ---------------------------------------------------
// Reads `floats` floats, a multiple of 16, once and in order. Returns the sum of some thread's
// share, so that the compiler cannot drop the reads.
float pm_probe_stream(const float* data, long floats, int threads);
// Runs `rounds` rounds of vector multiply-adds per thread; returns the multiply-adds of all lanes.
long pm_probe_arithmetic(long rounds, int threads);

}  // extern "C"
