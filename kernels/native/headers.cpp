// Publishes and reads page headers, which processes share without locks, relying only on the order
// of stores. All accesses are to atomic words, so that a torn read shows as a wrong check word and
// is never undefined behaviour.
#include "pagemesh_native.h"

#include <cstring>

namespace {

constexpr int kStateShift = 56;
constexpr uint64_t kSequenceMask = (uint64_t{1} << kStateShift) - 1;
constexpr uint64_t kFree = 0, kInvalid = 1, kHeld = 2, kCommitted = 3;
constexpr long kUntilWord = 6, kCheckWord = 7;
constexpr int kUntilBits = 48;
constexpr uint64_t kUntilMask = (uint64_t{1} << kUntilBits) - 1;
constexpr int kWaitSpinsMax = 1 << 14;  // a rewrite takes well under a microsecond
constexpr int kScanTriesMax = 64;
constexpr long kTokensWord = 8;
constexpr long kHeaderWordsMax = kTokensWord + 128;  // for 256 tokens, the largest page
constexpr long kUsualWords = kTokensWord + 8;        // for 16 tokens, the usual page

inline uint64_t load(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
inline void store(uint64_t* word, uint64_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
}
inline uint64_t load_acquire(const uint64_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
inline void store_release(uint64_t* word, uint64_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// A multiply-and-fold hash: not cryptographic, catches torn and flipped words.
inline uint64_t mix(uint64_t hash, uint64_t word) {
  unsigned __int128 product =
      static_cast<unsigned __int128>(hash ^ word) * 0x9E3779B97F4A7C15ull;
  return (static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64)) +
         0xD1B54A32D192ED03ull;
}

inline uint64_t check_word(const uint64_t* header, long header_words) {
  uint64_t hash = 0x706167656D657368ull;
  for (long i = 1; i < header_words; ++i) {
    // A page's expiry may change while its header stands; whether it has one does not.
    if (i != kCheckWord) hash = mix(hash, i == kUntilWord ? header[i] != 0 : header[i]);
  }
  return hash;
}

// The word with a page's expiry: the time in the low bits, and a check of it and the page's
// identity in the others. It is one word so that one store changes it.
uint64_t until_word(uint64_t until_ms, uint64_t identity) {
  if (!until_ms) return 0;
  uint64_t until = until_ms < kUntilMask ? until_ms : kUntilMask;
  return mix(mix(0x756E74696Cull, until), identity) >> kUntilBits << kUntilBits | until;
}

// `check`: the check word of `body`.
inline void publish(uint64_t* header, const uint64_t* body, long header_words, uint64_t check) {
  // INVALID carries the new sequence, so that a reader can tell a rewrite within its grant
  // from a new grant, and a recovery never loses the highest sequence.
  store(header, (kInvalid << kStateShift) | (body[0] & kSequenceMask));
  __atomic_thread_fence(__ATOMIC_RELEASE);
  for (long i = 1; i < header_words; ++i) {
    if (i != kCheckWord) store(header + i, body[i]);
  }
  store_release(header + kCheckWord, check);
  store_release(header, body[0]);
}

inline uint64_t state_word(uint64_t state, uint64_t sequence) {
  return (state << kStateShift) | (sequence & kSequenceMask);
}

// The extents of a call: those given, or the one of `run`.
struct Extents {
  Extents(const PmHeaderRun* run, const uint32_t* given, long given_count)
      : pairs(given ? given : run->one_extent), count(given ? given_count : 1) {}
  const uint32_t* pairs;
  long count;
};

// 0, or 1 + the index of the first extent that is not wholly in the pool.
long first_bad(const Extents& extents, long page_count) {
  for (long e = 0; e < extents.count; ++e) {
    uint64_t end = static_cast<uint64_t>(extents.pairs[2 * e]) + extents.pairs[2 * e + 1];
    if (end > static_cast<uint64_t>(page_count)) return 1 + e;
  }
  return 0;
}

// `words_known`, if not 0, is the size of each header. As a constant it lets the compiler unroll
// the loops over words, and the check words of neighbouring headers are computed in parallel.
template <long words_known>
void write_headers(const PmHeaderRun* run, const Extents& extents, const uint64_t* sequences,
                   const uint32_t* tokens) {
  const long words = words_known ? words_known : run->header_words;
  uint64_t body[words_known ? words_known : kHeaderWordsMax] = {0};
  body[3] = run->writer;
  body[4] = run->root | static_cast<uint64_t>(run->token_count) << 32;
  const bool alike = !run->first_identity && !run->token_count;  // but for state words
  uint64_t parent = run->parent, identity = run->first_identity, n = 0, check = 0;
  for (long e = 0; e < extents.count; ++e) {
    uint64_t* header = run->table + static_cast<long>(extents.pairs[2 * e]) * words;
    for (uint32_t left = extents.pairs[2 * e + 1]; left; --left, ++n, header += words) {
      body[0] = state_word(run->state, sequences ? sequences[n] : run->first_sequence + n);
      body[1] = identity;
      body[2] = parent;
      body[kUntilWord] = until_word(run->until_ms, identity);
      if (identity) parent = identity++;
      if (run->token_count) {
        std::memcpy(body + kTokensWord, tokens + n * run->token_count, 4 * run->token_count);
      }
      if (!n || !alike) check = check_word(body, words);
      publish(header, body, words, check);
    }
  }
}

// True if the copy is consistent: the state word did not change while the body was read.
bool copy_header(const uint64_t* header, long header_words, uint64_t* out) {
  for (int attempt = 0; attempt < kScanTriesMax; ++attempt) {
    uint64_t before = load_acquire(header);
    for (long i = 1; i < header_words; ++i) out[i] = load(header + i);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    out[0] = load(header);
    if (out[0] == before) return true;
    pause();
  }
  return false;
}

}  // namespace

extern "C" {

PM_EXPORT uint64_t pm_check_word(const uint64_t* header, long header_words) {
  return check_word(header, header_words);
}

PM_EXPORT long pm_headers_write(const PmHeaderRun* run, const uint32_t* given,
                                long given_count, const uint64_t* sequences,
                                const uint32_t* tokens) {
  const Extents extents(run, given, given_count);
  const long words = run->header_words;
  if (words > kHeaderWordsMax || run->token_count > 2 * (words - kTokensWord)) return -1;
  if (long bad = first_bad(extents, run->page_count)) return bad;
  if (words == kUsualWords) {
    write_headers<kUsualWords>(run, extents, sequences, tokens);
  } else {
    write_headers<0>(run, extents, sequences, tokens);
  }
  return 0;
}

PM_EXPORT long pm_headers_mark(const PmHeaderRun* run, const uint32_t* given, long given_count,
                               const uint64_t* sequences) {
  const Extents extents(run, given, given_count);
  if (long bad = first_bad(extents, run->page_count)) return bad;
  uint64_t n = 0;
  for (long e = 0; e < extents.count; ++e) {
    uint64_t* header = run->table + static_cast<long>(extents.pairs[2 * e]) * run->header_words;
    for (uint32_t left = extents.pairs[2 * e + 1]; left; --left, ++n, header += run->header_words) {
      uint64_t sequence = sequences ? sequences[n] : run->first_sequence + n;
      if (run->state == kFree && load(header + kUntilWord)) {
        for (long i = kTokensWord; i < run->header_words; ++i) store(header + i, 0);
      }
      store_release(header, state_word(run->state, sequence));
    }
  }
  return 0;
}

PM_EXPORT long pm_headers_keep(const PmHeaderRun* run, const uint32_t* given,
                               long given_count) {
  const Extents extents(run, given, given_count);
  if (long bad = first_bad(extents, run->page_count)) return bad;
  for (long e = 0; e < extents.count; ++e) {
    uint64_t* header = run->table + static_cast<long>(extents.pairs[2 * e]) * run->header_words;
    for (uint32_t left = extents.pairs[2 * e + 1]; left; --left, header += run->header_words) {
      uint64_t until = load(header + kUntilWord);
      if (!until || (until & kUntilMask) >= run->until_ms) continue;
      if (load(header) >> kStateShift != kCommitted) continue;
      store_release(header + kUntilWord, until_word(run->until_ms, load(header + 1)));
    }
  }
  return 0;
}

PM_EXPORT long pm_headers_fresh(const uint64_t* table, long header_words, const uint32_t* pages,
                                long count, long page_count, uint64_t granted_at) {
  // The caller's reads of the pages must not be delayed past this check (see pm_words_same).
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  for (long n = 0; n < count; ++n) {
    if (static_cast<long>(pages[n]) >= page_count) return n;
    const uint64_t* header = table + static_cast<long>(pages[n]) * header_words;
    uint64_t word = load_acquire(header);
    for (int spin = 0; spin < kWaitSpinsMax && word >> kStateShift == kInvalid &&
                       (word & kSequenceMask) <= granted_at;
         ++spin) {
      pause();
      word = load_acquire(header);
    }
    uint64_t state = word >> kStateShift;
    if ((state != kHeld && state != kCommitted) || (word & kSequenceMask) > granted_at) return n;
  }
  return count;
}

PM_EXPORT void pm_headers_scan(const uint64_t* table, long header_words, long first, long count,
                               uint64_t* out, uint8_t* torn) {
  for (long n = 0; n < count; ++n) {
    uint64_t* copy = out + n * header_words;
    bool whole = copy_header(table + (first + n) * header_words, header_words, copy);
    bool free = copy[0] >> kStateShift == kFree;  // whatever its body says
    bool valid = copy[0] >> kStateShift != kInvalid &&
                 copy[kCheckWord] == check_word(copy, header_words) &&
                 copy[kUntilWord] == until_word(copy[kUntilWord] & kUntilMask, copy[1]);
    torn[n] = whole && (free || valid) ? 0 : 1;
  }
}

PM_EXPORT void pm_word_store(uint64_t* word, uint64_t value) { store_release(word, value); }
PM_EXPORT uint64_t pm_word_load(const uint64_t* word) { return load_acquire(word); }

PM_EXPORT void pm_words_same(const uint64_t* words, long word_count, const uint32_t* slots,
                             const uint64_t* expected, long count, uint8_t* same) {
  // The caller has read before this check: an acquire load alone would let those reads come later.
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  for (long n = 0; n < count; ++n) {
    bool inside = static_cast<long>(slots[n]) < word_count;
    same[n] = inside && load_acquire(words + slots[n]) == expected[n] ? 1 : 0;
  }
}

}  // extern "C"
