// A monotonic clock in microseconds. Each level compiles its own copy, which the linker must not
// merge with another level's.
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
