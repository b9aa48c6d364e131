// Words in shared memory on which processes wait, by futex.
#include <time.h>

#include "pagemesh_native.h"

#ifdef __linux__
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

extern "C" {

PM_EXPORT void pm_word_advance(uint32_t* word) {
  __atomic_fetch_add(word, 1, __ATOMIC_RELEASE);
#ifdef __linux__
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

PM_EXPORT void pm_word_await(const uint32_t* word, uint32_t seen, long timeout_us) {
#ifdef __linux__
  const timespec timeout = {timeout_us / 1000000, timeout_us % 1000000 * 1000};
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
#else
  // Without a futex nobody wakes the caller: it looks again soon.
  if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != seen) return;
  const timespec nap = {0, (timeout_us < 500 ? timeout_us : 500) * 1000};
  nanosleep(&nap, nullptr);
#endif
}

}  // extern "C"
