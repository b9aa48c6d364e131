#include "gathering.h"

#include "clock.h"

#ifdef __linux__
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

namespace {

constexpr int kLooks = 64;  // between two readings of the clock

pm::Patience patience_of_all(0);
thread_local double own_slept_us = 0;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory");
#endif
}

bool changes_soon(const uint32_t* word, uint32_t seen) {
  for (int look = 0; look < kLooks; ++look) {
    if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != seen) return true;
    relax();
  }
  return false;
}

void sleep_while(const uint32_t* word, uint32_t seen) {
#ifdef __linux__
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
  (void)word, (void)seen;
  sched_yield();
#endif
}

void wake_all(const uint32_t* word) {
#ifdef __linux__
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

}  // namespace

namespace pm {

Patience& patience() { return patience_of_all; }

double slept_us() { return own_slept_us; }

void Gathering::wait(int count) {
  const uint32_t seen = __atomic_load_n(&meetings_, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&arrived_, 1, __ATOMIC_ACQ_REL) < static_cast<uint32_t>(count)) {
    look_out(seen, count);
    return;
  }
  __atomic_store_n(&arrived_, 0, __ATOMIC_RELAXED);
  // This side writes meetings_ and then reads sleepers_, a sleeper writes sleepers_ and then reads
  // meetings_: one of them sees what the other wrote, so that no wake-up is lost.
  __atomic_store_n(&meetings_, seen + 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&sleepers_, __ATOMIC_SEQ_CST)) wake_all(&meetings_);
}

void Gathering::look_out(uint32_t seen, int count) {
  if (changes_soon(&meetings_, seen)) return;
  const double since_us = now_us(), look_us = patience().look_us(count, since_us);
  double at_us = since_us;
  for (; at_us - since_us < look_us; at_us = now_us()) {
    if (changes_soon(&meetings_, seen)) return;
  }
  __atomic_add_fetch(&sleepers_, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&meetings_, __ATOMIC_SEQ_CST) == seen) sleep_while(&meetings_, seen);
  __atomic_sub_fetch(&sleepers_, 1, __ATOMIC_RELAXED);
  own_slept_us += now_us() - at_us;
}

}  // namespace pm
