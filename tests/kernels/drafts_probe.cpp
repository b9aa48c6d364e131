// What drafts.h guesses, for test_guesses.py.
#include "drafts.h"

extern "C" {

long probe_match(const uint32_t* history, long count, long* length) {
  const pm::Match found = pm::longest_match(history, count);
  *length = found.length;
  return found.end;
}

void probe_draft(const uint32_t* history, long count, long wanted, int64_t* to) {
  pm::draft(history, count, pm::longest_match(history, count), wanted, to);
}

long probe_wanted(float chance, long sequences, long each_max) {
  return pm::wanted_drafts(chance, sequences, each_max);
}

// Of a match of so many tokens, before anything is known.
float probe_first_chance(long length) {
  pm::Match match;
  match.length = length;
  return pm::kFirstChances[match.is_long()];
}

float probe_learn(float chance, long right, bool ends) {
  pm::learn(&chance, right, ends);
  return chance;
}
}
