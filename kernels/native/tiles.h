// Matrix tiles (AMX): float32 values as sums of three bfloat16s, the parts. With 8 + 8 + 8 bits of
// significand nothing is lost. Of the nine products of two such values, the six that are large
// enough for float32 are added up, small ones first; a tile sums 32 values of K at a time, in
// float32, which rounds less often than one chain of multiply-adds. As everywhere else, the order
// in which an element's sum goes over K does not depend on rows, units and threads.
//
// Rows that are rounded to bfloat16 (pairs.h) are one part, and so are weights of bfloat16 or int8.
//
// Infinities in split rows become NaN, since their parts do not add up to them.
//
// Henry, Tang and Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for
// higher-precision computations" (2019).
#pragma once

#include "linear.h"

namespace {

using Word = uint16_t;  // a bfloat16

constexpr long kTileHeight = 16, kTileDepth = 32, kTileWords = kTileHeight * kTileDepth;
constexpr long kTilePairs = kTileDepth / 2;  // value i of K lies beside value i + 16
constexpr long kSumFloats = kTileHeight * kLanes;
// The parts of a row: one if it is rounded to bfloat16.
constexpr long row_parts(bool rounds) { return rounds ? 1 : 3; }

inline __m512i bits_of(__m512 value) { return _mm512_castps_si512(value); }
inline __m512 upper_of(__m512i bits) {
  return _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-0x10000)));
}
// Stores the upper halves of both, interleaved.
inline void store_uppers(Word* to, __m512i low, __m512i high) {
  _mm512_store_si512(to, _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(low, 16), high));
}

// Splits values of K (`low`) and those 16 further on (`high`), of one row or of 16 columns, into a
// line of a tile for each part. The first part is rounded, ties away from zero, so that the
// remainder has 16 bits and either sign.
inline void split_pair(V low, V high, Word* to) {
  __m512 a = low.v, b = high.v;
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i a_rounded = _mm512_add_epi32(bits_of(a), half);
  const __m512i b_rounded = _mm512_add_epi32(bits_of(b), half);
  store_uppers(to, a_rounded, b_rounded);
  a = _mm512_sub_ps(a, upper_of(a_rounded));
  b = _mm512_sub_ps(b, upper_of(b_rounded));
  store_uppers(to + kTileWords, bits_of(a), bits_of(b));
  a = _mm512_sub_ps(a, upper_of(bits_of(a)));
  b = _mm512_sub_ps(b, upper_of(bits_of(b)));
  store_uppers(to + 2 * kTileWords, bits_of(a), bits_of(b));
}

// The same for values that are rounded to one part, to nearest, ties to even.
inline void round_pair(V low, V high, Word* to) {
  const __m512i words = (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v);
  const __m512i alternating = _mm512_set_epi16(
      31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
      3, 18, 2, 17, 1, 16, 0);
  _mm512_store_si512(to, _mm512_permutexvar_epi16(alternating, words));
}

// Whether codes are values of bfloat16.
template <typename T>
constexpr bool kIsOnePart = false;
template <>
constexpr bool kIsOnePart<Int8> = true;
template <>
constexpr bool kIsOnePart<Bfloat16> = true;

// Weights of a tile: how many parts they have, and how the panel's codes become a line of each
// part; for null, of zeros.
template <typename T>
struct SplitWeights {
  static constexpr int kParts = kIsOnePart<T> ? 1 : 3;
  static void line(const char* low, const char* high, Word* to) {
    const V a = low ? T::decode(reinterpret_cast<const typename T::Code*>(low)) : zero();
    const V b = high ? T::decode(reinterpret_cast<const typename T::Code*>(high)) : zero();
    if constexpr (kParts == 1) {
      store_uppers(to, bits_of(a.v), bits_of(b.v));
    } else {
      split_pair(a, b, to);
    }
  }
};

// The rows of a product, split or rounded: [tile of rows][tile of K][part][16][32].
struct RowTiles {
  Word* words;
  long deep;    // tiles of K
  long tiles;   // of rows
  long height;  // rows of a tile
  bool rounds;  // to bfloat16

  RowTiles(Word* memory, long rows, long k, bool rounded)
      : words(memory), deep(pieces(k, kTileDepth)), tiles(pieces(rows, kTileHeight)),
        height(pieces(rows, tiles)), rounds(rounded) {}
  long tile_words() const { return row_parts(rounds) * kTileWords; }
  long apart() const { return deep * tile_words(); }  // from tile to tile of rows
  Word* at(long tile, long depth) const { return words + tile * apart() + depth * tile_words(); }
  void put(const float* x, long row, long k) const {
    Word* to = at(row / height, 0) + row % height * kTileDepth;
    auto some = [&](long i) {
      const long left = k - i;
      if (left >= kLanes) return load(x + i);
      return left > 0 ? load_some(x + i, static_cast<int>(left)) : zero();
    };
    for (long i = 0; i < k; i += kTileDepth, to += tile_words()) {
      if (rounds) {
        round_pair(some(i), some(i + kTilePairs), to);
      } else {
        split_pair(some(i), some(i + kTilePairs), to);
      }
    }
  }
};

// Configures the tile registers, for as long as it lives: 0 to 3 are sums, of two tiles of rows and
// two panels; 4 and 5 are of rows, 6 and 7 of panels.
struct Tiles {
  struct alignas(kLineBytes) Config {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t line_bytes[16] = {};
    uint8_t lines[16] = {};
  };

  explicit Tiles(long height) {
    Config config;
    for (int tile = 0; tile < 8; ++tile) {
      config.line_bytes[tile] = kLineBytes;
      config.lines[tile] = static_cast<uint8_t>(tile < 6 ? height : kTilePairs);
    }
    // GCC's headers before 14 declare only the first eight bytes as read.
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() { _tile_release(); }
};

// In the following functions R is the number of tiles of rows, 1 or 2; there are always two panels.
template <int R>
inline void load_rows(const Word* at, long apart) {
  _tile_loadd(4, at, kLineBytes);
  if constexpr (R > 1) _tile_loadd(5, at + apart, kLineBytes);
}

inline void load_panels(const Word* at, long apart) {
  _tile_loadd(6, at, kLineBytes);
  _tile_loadd(7, at + apart, kLineBytes);
}

template <int R>
inline void multiply_tiles() {
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (R > 1) _tile_dpbf16ps(1, 5, 6);
  _tile_dpbf16ps(2, 4, 7);
  if constexpr (R > 1) _tile_dpbf16ps(3, 5, 7);
}

template <int R>
inline void zero_sums() {
  _tile_zero(0);
  if constexpr (R > 1) _tile_zero(1);
  _tile_zero(2);
  if constexpr (R > 1) _tile_zero(3);
}

// Sums lie [panel][tile of rows][16][16], panels `apart` floats apart.
template <int R>
inline void load_sums(const float* at, long apart) {
  _tile_loadd(0, at, kLineBytes);
  if constexpr (R > 1) _tile_loadd(1, at + kSumFloats, kLineBytes);
  _tile_loadd(2, at + apart, kLineBytes);
  if constexpr (R > 1) _tile_loadd(3, at + apart + kSumFloats, kLineBytes);
}

template <int R>
inline void store_sums(float* at, long apart) {
  _tile_stored(0, at, kLineBytes);
  if constexpr (R > 1) _tile_stored(1, at + kSumFloats, kLineBytes);
  _tile_stored(2, at + apart, kLineBytes);
  if constexpr (R > 1) _tile_stored(3, at + apart + kSumFloats, kLineBytes);
}

// Adds to the sums the products over 32 values of K: of R tiles of rows of ROW_PARTS parts each,
// `rows_apart` apart, and two panels of PARTS parts each. Calls `between()` kBetween times, since a
// tile's product takes longer to complete than to issue.
template <long ROW_PARTS, int PARTS>
constexpr long kBetween = PARTS == 1 ? ROW_PARTS : 6;

template <int R, long ROW_PARTS, int PARTS, typename Between>
inline void add_tile(const Word* rows, long rows_apart, const Word* panels, Between between) {
  static_assert(ROW_PARTS > 1 || PARTS == 1, "rows are rounded for weights of one part alone");
  constexpr long kApart = PARTS * kTileWords;
  auto multiply = [&] {
    multiply_tiles<R>();
    between();
  };
  load_panels(panels, kApart);
  if constexpr (ROW_PARTS > 1) {
    load_rows<R>(rows + 2 * kTileWords, rows_apart);
    multiply();
    load_rows<R>(rows + kTileWords, rows_apart);
    multiply();
  }
  if constexpr (PARTS == 1) {
    load_rows<R>(rows, rows_apart);
    multiply();
  } else {
    load_panels(panels + kTileWords, kApart);
    multiply();
    load_rows<R>(rows, rows_apart);
    multiply();
    load_panels(panels + 2 * kTileWords, kApart);
    multiply();
    load_panels(panels, kApart);
    multiply();
  }
}

// A compiler barrier: compilers do not know that tiles are loaded from memory written before.
inline void finish_stores() { __asm__ volatile("" ::: "memory"); }

}  // namespace
