// The library's C interface. Pointers are not owned; sizes are in elements unless named _bytes.
// Functions that check their input return 0, or 1 + the index of the first bad item.
#pragma once

#include <cstdint>

#define PM_EXPORT __attribute__((visibility("default")))

extern "C" {

// --- Which code runs ---------------------------------------------------------------------------
enum PmLevel { PM_PORTABLE = 0, PM_AVX2 = 1, PM_AVX512 = 2, PM_AVX512_BF16 = 3, PM_AMX = 4 };

int pm_abi_version(void);
int pm_best_level(void);      // what this CPU can run
int pm_set_level(int level);  // 0, or 1 when this CPU or build cannot
int pm_level(void);
// Entry points of an OpenMP runtime: GOMP_parallel, omp_get_thread_num, omp_get_num_threads,
// omp_get_num_procs.
void pm_lend_threads(void* parallel, void* index, void* count, void* cores);
// Thread i of a region that the caller begins, itself being the first, runs on cores[i] alone from
// now on; those beyond `count`, and with a count of 0 all of them, anywhere. Not while it runs one.
// Regions that others begin run where they did.
void pm_bind_threads(const int* cores, int count);

// --- Page headers (see pagemesh/wire/pool_format.py) -----------------------------------------
// Over all words but the state word and its own.
uint64_t pm_check_word(const uint64_t* header, long header_words);
// What the headers of a list of pages have in common. Identities and, unless given one by one,
// sequences count up from page to page; each page's parent is the one before it. An identity of
// 0 is none, and stays.
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
  uint64_t until_ms;  // until when committed pages are kept; 0: there is no end
  uint32_t one_extent[2];  // first page, page count
} PmHeaderRun;
// Writes the headers of `extents`, pairs of (first page, page count), or of the run's own where
// they are null (so in the next two calls), one after the other: INVALID, body, check word, state
// (release). `sequences`: one a page, or null. `tokens`: token_count a page. Returns 0; -1 when the
// tokens do not fit; 1 + the index of the first extent that is not in the pool. Then nothing is
// written.
long pm_headers_write(const PmHeaderRun* run, const uint32_t* extents, long extent_count,
                      const uint64_t* sequences, const uint32_t* tokens);
// The same for state words alone (release). Bodies stay, but for the tokens of what is kept until
// some time, which are wiped before it is FREE.
long pm_headers_mark(const PmHeaderRun* run, const uint32_t* extents, long extent_count,
                     const uint64_t* sequences);
// Keeps COMMITTED pages that have an end until `until_ms`, or for longer if that was so before: one
// store each. Others are left alone.
long pm_headers_keep(const PmHeaderRun* run, const uint32_t* extents, long extent_count);
// How many pages from the start are HELD or COMMITTED with a sequence of at most `granted_at`.
// A header that is being rewritten under such a sequence is waited for, boundedly.
long pm_headers_fresh(const uint64_t* table, long header_words, const uint32_t* pages, long count,
                      long page_count, uint64_t granted_at);
// Copies headers out, consistently; torn[i] = 1 when one is INVALID, its check word does not
// match, the time in it is damaged or it kept changing. The body of a FREE page means nothing and is not checked.
void pm_headers_scan(const uint64_t* table, long header_words, long first, long count,
                     uint64_t* out, uint8_t* torn);

// --- Single words -------------------------------------------------------------------------------
void pm_word_store(uint64_t* word, uint64_t value);  // release
uint64_t pm_word_load(const uint64_t* word);         // acquire
// Among processes: count *word up (release) and wake who awaits it; sleep while it is `seen`, for
// timeout_us at most.
void pm_word_advance(uint32_t* word);
void pm_word_await(const uint32_t* word, uint32_t seen, long timeout_us);
// same[i] = 1 when words[slots[i]] == expected[i] (acquire).
void pm_words_same(const uint64_t* words, long word_count, const uint32_t* slots,
                   const uint64_t* expected, long count, uint8_t* same);

// --- Kernels (contracts: pagemesh/kernels/<operation>) -----------------------------------------
// How the panels of a packed weight are kept (weights.h).
enum PmWeightType { PM_WEIGHT_FLOAT32 = 0, PM_WEIGHT_INT8 = 1, PM_WEIGHT_BFLOAT16 = 2,
                    PM_WEIGHT_FLOAT16 = 3, PM_WEIGHT_SLIM_BFLOAT16 = 4 };

// Of elements of `item_bytes`, 2 or 4; `row_stride` in elements.
void pm_linear_pack(const void* weight, long row_stride, void* packed, long n, long k,
                    long item_bytes);
// bfloat16s as PM_WEIGHT_SLIM_BFLOAT16 (slim_layout.h). Returns 1, and what is in `packed` is of no
// use, where they cannot be kept so; with `packed` null that is all it says.
int pm_linear_pack_slim(const uint16_t* weight, long row_stride, void* packed, long n, long k);
void pm_rms_norm(const float* x, long x_stride, const float* weight, float* out, long out_stride,
                 long rows, long width, float epsilon, int threads);
void pm_rope(float* x, long row_stride, const float* cosine, const float* sine, long rows,
             long heads, long head_dim, long rotary_dim, int threads);
void pm_silu_mul(const float* gate_up, long in_stride, float* out, long out_stride, long rows,
                 long width, int threads);
void pm_log_softmax(const float* x, long x_stride, float* out, long out_stride, long rows,
                    long width, int threads);
// Weights of a softmax are summed by blocks of so many columns.
enum { PM_SUM_BLOCK = 1024 };
// A column to draw from each of `count` rows, rows[i] of x the i-th, by the weights
// exp((x - highest) / temperature): the first column whose running sum of weights exceeds
// uniforms[i] of the whole sum. Of these weights the limits leave, in this order, what is at least
// min_p, the top_k highest, and the highest before which there is less than top_p of what was left;
// the lowest columns of equals, and the highest of all in any case. None: min_p 0, top_k 0 or at
// least the width, top_p 1. The limits are given for all rows, or null.
typedef struct {
  const int64_t* rows;
  const float* temperatures;
  const double* uniforms;
  const float* min_p;
  const int64_t* top_k;
  const double* top_p;
  long count;
} PmDraws;
// `weights`: [count][width], or null; 0 for what is left out. `sums`: [count][blocks], what each
// block weighs. Where a row's highest is no finite number no number is their sum, and the column
// is 0. Returns 1 + the index of the first row that x has not; nothing was written then.
long pm_softmax_draw(const float* x, long x_stride, long x_rows, const PmDraws* draws, long width,
                     float* weights, double* sums, int64_t* tokens, int threads);

// What is asked of each of `count` rows, rows[i] of x the i-th: the log-softmax of `column_count`
// columns and of the top_counts[i] highest, or all there are.
typedef struct {
  const int64_t* rows;
  const int64_t* columns;     // [count][column_count]
  const int64_t* top_counts;
  long column_count, count;
} PmScored;
// `scores`: [count][column_count]. `top_columns` and `tops`: [count][top_stride], the highest first
// and the lowest columns of equals; of a row with what is no number the first columns. Bits are those
// of pm_log_softmax. Returns 1 + the index of the first row that x or one of whose columns a row has
// not; nothing was written then.
long pm_top_scores(const float* x, long x_stride, long x_rows, long width, const PmScored* scored,
                   long top_stride, float* scores, int64_t* top_columns, float* tops,
                   int threads);

// What is done to a row, in this order: -INFINITY in `masked` columns, biases[i] added to biased[i],
// what is above 0 in `repeated` divided by `repetition` and the rest multiplied by it, and
// frequency * counts[i], then `presence`, taken from counted[i]. No column twice in one list, but
// `masked`. Masked and biased columns that a row has not are left out; the others it has.
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
// edits[i] to rows[i] of x, no row twice. What was there goes to `saved`, from saved_indptr[i] on as
// many as all columns of edits[i]. Returns 1 + the index of the first row that x has not; nothing was
// written then.
long pm_edit_rows(float* x, long x_stride, long x_rows, long width, const int64_t* rows,
                  const PmEdits* const* edits, const int64_t* saved_indptr, long count,
                  float* saved, int threads);
// Back to what it was, after pm_edit_rows with the same.
void pm_restore_rows(float* x, long x_stride, long width, const int64_t* rows,
                     const PmEdits* const* edits, const int64_t* saved_indptr, long count,
                     const float* saved, int threads);

// What an element of K and V is kept as (kv_types.h): its code, with a scale for some.
enum PmKvType { PM_KV_FLOAT32 = 0, PM_KV_FLOAT16 = 1, PM_KV_BFLOAT16 = 2, PM_KV_INT8 = 3,
                PM_KV_E4M3 = 4 };

// Where K and V of one layer lie in a pool; strides in codes.
struct PmPages {
  void* base;               // of the first page, at this layer's K
  long page_stride;         // from page to page
  long value_offset;        // from a head's K to its V
  long head_stride;         // from KV head to KV head, for K and V alike
  long page_count;
  long page_size;           // slots
  long kv_heads;
  long head_dim;
  long kv_type;             // PmKvType
  long scale_offset_bytes;  // from a head's K to the scales of its slots; from its V likewise
};

long pm_kv_write(const PmPages* pages, const float* k, long k_stride, const float* v,
                 long v_stride, const int64_t* slots, long rows, int threads);
// K and V of positions [first, first + count) of one sequence, as [kv_heads][count][head_dim].
long pm_kv_gather(const PmPages* pages, const int32_t* table, long table_pages, long first,
                  long count, float* k, float* v, int threads);
// soft_cap: INFINITY for none. window_tokens: LONG_MAX for none; pages before it are not looked at.
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
  long rounds_rows;  // to bfloat16; of bfloat16 and int8 alone, of others it is not looked at
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
  long row_invariant;   // rows have the same bits in any company
  long embedding_type;  // PmWeightType, none with scales
};

// A ragged batch, see pagemesh/kernels/batch.py; `wanted` rows, ascending, go to the end.
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
// What pm_decoder_step finds wrong, plus the index of the row; nothing was written then.
enum PmBad : long {
  PM_BAD_TOKEN = 1L << 32,
  PM_BAD_POSITION = 2L << 32,
  PM_BAD_SLOT = 3L << 32,
  PM_BAD_WANTED = 4L << 32,
  PM_BAD_TABLE = 5L << 32,
};

// Floats of workspace that a step of so many rows needs.
long pm_decoder_workspace(const PmDecoder* decoder, long rows, int threads);
// `pages`: of each layer. `workspace`: aligned to 64 bytes. `hidden`: [wanted][hidden], the last
// norm's result; `logits`: [wanted][vocab] or null; `phase_us`: [PM_PHASES], added to, or null.
long pm_decoder_step(const PmDecoder* decoder, const PmPages* const* pages, const PmRows* batch,
                     float* workspace, float* hidden, float* logits, double* phase_us,
                     int threads);

#define PM_CHANCES 2  // after a short match and after a long one
// What may come next, guessed from what came before (drafts.h) and verified by the step that
// computes it.
struct PmDrafts {
  uint32_t* history;  // [sequences][history_stride]: tokens so far, that of the batch being the last
  long history_stride;
  int64_t* history_count;  // [sequences]; with room for PmRun.token_count more
  float* chances;          // [sequences][PM_CHANCES]: that a guess is right, as seen; 0 at first
  long each_max;           // of a sequence in a step
  long rows_max;           // of a step, drafts among them
};

// Steps that follow one another, each row going on with what it drew (contract: decoder_step).
struct PmRun {
  const PmDecoder* decoder;
  const PmPages* const* pages;
  const PmRows* batch;  // of the first step; all of its rows are wanted, one a sequence
  float* workspace;         // this and the next two: for so many rows as a step may have
  float* hidden;
  float* logits;
  const PmDrafts* drafts;   // or null
  // uniforms: [token_count][sequences]. Null, or a temperature of 0: the first of the highest.
  const PmDraws* draws;
  double* sums;             // [rows of a step][blocks]
  const int64_t* stops;     // of row i: [stop_indptr[i], stop_indptr[i + 1])
  const int64_t* stop_indptr;
  const uint64_t* lease_words;  // see pm_words_same, asked after each step
  long lease_word_count;
  const uint32_t* lease_slots;
  const uint64_t* leases;
  uint8_t* same;
  const uint32_t* end;             // not 0: no further step
  const uint64_t* const* waiting;  // words; not 0: somebody waits for the cores
  long waiting_count;
  long token_count;        // drawn for each sequence, at most
  double for_us;           // no further step is begun after so long
  int64_t* drawn;          // [sequences][token_count]; -1 from logits that are no numbers
  int64_t* drawn_count;    // [sequences]; 0 at first, as the next
  int64_t* drafted_count;  // [sequences]: drafts, right or wrong
  double* took_us;         // [token_count]
};
// How many steps were done, at least one; or minus what is wrong with one (PmBad). A run ends
// before its time where somebody has to decide: a sequence drew a token that stops it or none at
// all, has no slot for another, or its lease has ended.
long pm_decoder_run(const PmRun* run, int threads);

// --- What the machine can do (for benchmarks) -------------------------------------------------
// Reads `floats` (a multiple of 16) floats, once and in order. Returns what some thread's share of
// them sums to, so that no read can be left out.
float pm_probe_stream(const float* data, long floats, int threads);
// `rounds` rounds of vector multiply-adds a thread; how many multiply-adds that were in all.
long pm_probe_arithmetic(long rounds, int threads);

}  // extern "C"
