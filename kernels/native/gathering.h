// A barrier. Threads that wait spin at first, for as long as patience() says, and then sleep.
#pragma once

#include <stdint.h>

#include "patience.h"

namespace pm {

// Shared by all threads of the process. Brief until the number of cores is known, or if it cannot
// be.
Patience& patience();

class Gathering {
 public:
  // Returns when `count` threads have called it as often as the caller has. All of them then see
  // what any of them wrote before.
  void wait(int count);

 private:
  void look_out(uint32_t seen, int count);

  alignas(64) uint32_t arrived_ = 0;
  alignas(64) uint32_t meetings_ = 0;
  uint32_t sleepers_ = 0;
};

// How long the calling thread has slept in Gathering::wait in total, in microseconds.
double slept_us();

}  // namespace pm
