// What may come next, guessed from what came before: where the last tokens stood before, what
// followed them is likely to follow again (prompt lookup, Saxena 2023). A guess is a *draft* until
// the step that computes it has drawn what precedes it; so a wrong one costs a row, and no bit of
// any result.
#pragma once

#include <stdint.h>

namespace pm {
namespace {

constexpr long kMatchMin = 3;   // fewer equal tokens say little
constexpr long kMatchLong = 8;  // so many say a lot: how often guesses are right is told apart
constexpr long kMatchMax = 16;  // more say no more
// Rows whose arithmetic takes about as long as fetching the weights for all of them.
constexpr float kRowsAStream = 4.0f;
constexpr float kFirstChances[] = {0.4f, 0.9f};  // until something is known, by kMatchLong
constexpr float kNews = 1.0f / 8;  // what one guess weighs, against all before it

// Where a run of tokens ends that the last ones are, too. A length of 0: there is none.
struct Match {
  long end = 0, length = 0;

  bool is_long() const { return length >= kMatchLong; }
};

// The last place up to `end`, and not before `length`, where the last `length` tokens end, too; 0:
// there is none.
inline long last_place(const uint32_t* history, long count, long end, long length) {
  constexpr long kBlock = 32;  // places looked at together, so that compilers make vectors of it
  const uint32_t* last = history + count;
  for (; end - length >= kBlock; end -= kBlock) {
    const uint32_t* places = history + end - kBlock + 1;
    uint32_t same[kBlock], any = 1;
    for (long j = 0; j < kBlock; ++j) same[j] = 1;
    // What makes a match longer than the one before is seldom there: that first.
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

// The longest match in `history`; the latest of equally long ones.
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

// What followed a match, `wanted` tokens of it. It may reach into the drafts: so what repeats goes
// on repeating.
inline void draft(const uint32_t* history, long count, const Match& match, long wanted,
                  int64_t* to) {
  for (long i = 0; i < wanted; ++i) {
    const long at = match.end + i;
    to[i] = at < count ? history[at] : to[at - count];
  }
}

// How many of the next guesses are worth a row each, in a step of `sequences` besides: when they are
// right more often than a row costs, as a share of what a token costs without them. `chance`: that
// a guess is right if those before it are.
inline long wanted_drafts(float chance, long sequences, long each_max) {
  const float rows = static_cast<float>(sequences), cost = rows / (rows + kRowsAStream);
  long count = 0;
  for (float all = chance; count < each_max && all >= cost; all *= chance) ++count;
  return count;
}

// The first `right` of some guesses were right; `ends`: the one after them was not.
inline void learn(float* chance, long right, bool ends) {
  for (long i = 0; i < right; ++i) *chance += kNews * (1.0f - *chance);
  if (ends) *chance -= kNews * *chance;
}

}  // namespace
}  // namespace pm
