// Microseconds of a clock that only goes forward. Each level has a copy of its own: the linker must
// not take that of another.
#pragma once

#include <time.h>

namespace pm {
namespace {

inline double now_us() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

}  // namespace
}  // namespace pm
