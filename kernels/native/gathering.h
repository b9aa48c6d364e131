// Where threads wait for each other: awake at first, as long as patience() says, asleep then.
#pragma once

#include <stdint.h>

#include "patience.h"

namespace pm {

// Of all threads of the process. Before the cores are known, and where that cannot be, it is brief.
Patience& patience();

class Gathering {
 public:
  // Returns when `count` threads have called it as often as the caller has. What any of them wrote
  // before, all of them see then.
  void wait(int count);

 private:
  void look_out(uint32_t seen, int count);

  alignas(64) uint32_t arrived_ = 0;
  alignas(64) uint32_t meetings_ = 0;
  uint32_t sleepers_ = 0;
};

// How long the calling thread has slept in `wait` in all.
double slept_us();

}  // namespace pm
