// How long a thread spins, waiting for the others of its region, before it sleeps.
//
// Waking a thread takes 30 to 50 us, and most waits of a step are shorter than that. But a spinning
// thread uses up its share of the core. If another process wants the core too, the system takes it
// away for a whole time slice of some milliseconds, and all threads of the step wait. So after a
// region in which one of its threads lost slices, threads spin only briefly for a while. They
// always do if there are more threads than cores: the thread they wait for may need theirs.
#pragma once

#include <stdint.h>

namespace pm {

class Patience {
 public:
  static constexpr double kLongUs = 50.0, kBriefUs = 10.0;
  // Shorter losses do not count: processes that run for a moment, such as those that pass messages
  // on, give the core back sooner. Slices are 2.8 ms and more on Linux.
  static constexpr double kSliceUs = 1000.0;
  static constexpr int64_t kHoldUs = 50'000, kHoldUsMax = 1'600'000;

  constexpr explicit Patience(int cores) : cores_(cores) {}

  void set_cores(int cores) { __atomic_store_n(&cores_, cores, __ATOMIC_RELAXED); }

  // How long one of `threads` threads that wait for each other spins, in microseconds.
  double look_us(int threads, double now_us) const {
    const bool few_cores = threads > __atomic_load_n(&cores_, __ATOMIC_RELAXED);
    const bool brief = few_cores || now_us < static_cast<double>(read(&brief_until_us_));
    return brief ? kBriefUs : kLongUs;
  }

  // Reports that a thread was preempted `times` times and lost its core for `lost_us` in all. Any
  // thread may call this at any time. Reports of several threads at the same time have the same
  // cause and count once.
  void lost(double lost_us, long times, double now_us) {
    if (times <= 0 || lost_us < kSliceUs * static_cast<double>(times)) return;
    const int64_t now = static_cast<int64_t>(now_us), held_us = read(&hold_us_);
    const int64_t until_us = read(&brief_until_us_);
    if (held_us && now < until_us - held_us + static_cast<int64_t>(kSliceUs)) return;
    // Whether the losses went on, or came back as soon as threads spun for long again.
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
