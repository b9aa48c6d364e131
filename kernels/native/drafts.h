// Drafts for speculative decoding, guessed from the context: the tokens that followed an earlier
// occurrence of the last tokens are likely to follow again (prompt lookup, Saxena 2023). The step
// that computes a draft also draws the token in its place, which tells whether the draft was right.
// A wrong one costs a row, and changes no bit of any result.
#pragma once

#include <stdint.h>

namespace pm {
namespace {

constexpr long kMatchMin = 3;   // shorter matches predict little
constexpr long kMatchLong = 8;  // from this length on, chances are estimated separately
constexpr long kMatchMax = 16;  // longer matches predict no better
// The number of rows whose arithmetic takes about as long as reading the weights once.
constexpr float kRowsAStream = 4.0f;
constexpr float kFirstChances[] = {0.4f, 0.9f};  // initial estimates: short matches, long ones
constexpr float kNews = 1.0f / 8;  // weight of one guess against all before it

// An earlier occurrence of the last `length` tokens, at [end - length, end); length 0 for none.
struct Match {
  long end = 0, length = 0;

  bool is_long() const { return length >= kMatchLong; }
};

// The last place in [length, end] where an earlier occurrence of the last `length` tokens ends, 0
// for none.
inline long last_place(const uint32_t* history, long count, long end, long length) {
  constexpr long kBlock = 32;  // places compared together, so that compilers vectorise it
  const uint32_t* last = history + count;
  for (; end - length >= kBlock; end -= kBlock) {
    const uint32_t* places = history + end - kBlock + 1;
    uint32_t same[kBlock], any = 1;
    for (long j = 0; j < kBlock; ++j) same[j] = 1;
    // The oldest token first: it makes the match longer than the one before, and seldom matches.
    for (long back = length; back > 0 && any; --back) {
      any = 0;
      for (long j = 0; j < kBlock; ++j) any |= same[j] &= places[j - back] == last[-back];
    }
    for (long j = kBlock; any && j-- > 0;) {
      if (same[j]) return end - kBlock + 1 + j;
    }
  }
  for (; end >= length; --end) {
    long equal = 0;
    while (equal < length && history[end - 1 - equal] == last[-1 - equal]) ++equal;
    if (equal == length) return end;
  }
  return 0;
}

// The longest match in `history`; of equally long ones the latest.
inline Match longest_match(const uint32_t* history, long count) {
  Match found;
  long end = count - 1;
  for (long length = kMatchMin; length <= kMatchMax; ++length) {
    end = last_place(history, count, end, length);
    if (!end) break;
    while (length < end && length < kMatchMax &&
           history[end - 1 - length] == history[count - 1 - length]) {
      ++length;
    }
    found = {end, length};
  }
  return found;
}

// Writes the `wanted` tokens that followed a match. Beyond the history these are the drafts
// themselves, so that a repetition goes on.
inline void draft(const uint32_t* history, long count, const Match& match, long wanted,
                  int64_t* to) {
  for (long i = 0; i < wanted; ++i) {
    const long at = match.end + i;
    to[i] = at < count ? history[at] : to[at - count];
  }
}

// How many drafts are worth a row each, in a step that has `sequences` rows without them: those for
// which the probability that they and all before them are right is at least the cost of a row,
// relative to that of a token without drafts. `chance`: the probability that a guess is right if
// those before it are.
inline long wanted_drafts(float chance, long sequences, long each_max) {
  const float rows = static_cast<float>(sequences), cost = rows / (rows + kRowsAStream);
  long count = 0;
  for (float all = chance; count < each_max && all >= cost; all *= chance) ++count;
  return count;
}

// Updates an estimate: the first `right` guesses were right; if `ends`, the one after them was
// wrong.
inline void learn(float* chance, long right, bool ends) {
  for (long i = 0; i < right; ++i) *chance += kNews * (1.0f - *chance);
  if (ends) *chance -= kNews * *chance;
}

}  // namespace
}  // namespace pm
