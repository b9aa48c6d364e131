// How long a thread looks out for the others of its region before it sleeps.
//
// To be woken takes 30 to 50 us, and most waits of a step are shorter than that. But who looks out
// uses up its share of the core. Where somebody else wants the core too, the system then takes it
// away for a whole slice of some milliseconds, and all threads of the step wait. So threads look
// out briefly for a while from the end of a region on in which one of them lost slices, and always
// where there are more threads than cores: whom they wait for then may want their own.
#pragma once

#include <stdint.h>

namespace pm {

class Patience {
 public:
  static constexpr double kLongUs = 50.0, kBriefUs = 10.0;
  // A thread that others interrupt for a moment, as those do that pass messages on, has it back
  // sooner. Slices are 2.8 ms and more on Linux.
  static constexpr double kSliceUs = 1000.0;
  static constexpr int64_t kHoldUs = 50'000, kHoldUsMax = 1'600'000;

  constexpr explicit Patience(int cores) : cores_(cores) {}

  void set_cores(int cores) { __atomic_store_n(&cores_, cores, __ATOMIC_RELAXED); }

  // Of one of `threads` that meet.
  double look_us(int threads, double now_us) const {
    const bool few_cores = threads > __atomic_load_n(&cores_, __ATOMIC_RELAXED);
    const bool brief = few_cores || now_us < static_cast<double>(read(&brief_until_us_));
    return brief ? kBriefUs : kLongUs;
  }

  // A thread was without its core for `lost_us` in all, `times` times, though it wanted it. Any
  // thread may say so at any time. What several say together came from the same others.
  void lost(double lost_us, long times, double now_us) {
    if (times <= 0 || lost_us < kSliceUs * static_cast<double>(times)) return;
    const int64_t now = static_cast<int64_t>(now_us), held_us = read(&hold_us_);
    const int64_t until_us = read(&brief_until_us_);
    if (held_us && now < until_us - held_us + static_cast<int64_t>(kSliceUs)) return;
    // It goes on, or is back as soon as threads look out for long again.
    const bool again = held_us && now < until_us + held_us;
    const int64_t hold_us = !again ? kHoldUs : held_us < kHoldUsMax / 2 ? 2 * held_us : kHoldUsMax;
    write(&hold_us_, hold_us);
    write(&brief_until_us_, now + hold_us);
  }

 private:
  static int64_t read(const int64_t* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
  static void write(int64_t* word, int64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
  }

  int cores_;
  int64_t brief_until_us_ = 0, hold_us_ = 0;
};

}  // namespace pm
