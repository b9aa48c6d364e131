// Threads are borrowed: the process hands over the entry points of the OpenMP runtime that it has
// already loaded (torch's own). Without one everything runs on the calling thread.
//
// Between regions, threads go to sleep after a few microseconds. The next region pays some 35 us to
// wake them and, where cores are shared, may wait a time slice for the last of them. So work that
// takes one thread less than about 80 us stays on one thread; results do not depend on it. Within a
// region, and between the regions of a team, threads spin for longer (patience.h).
#pragma once

namespace pm {

using Task = void (*)(void* data);

// Runs task(data) on at most `threads` threads at once, the caller included, and returns when all
// are done. Inside, thread_index() tells them apart and barrier() waits for all of them. A nested
// region runs only on the thread that begins it.
void run_parallel(Task task, void* data, int threads);
// Runs task(data) on the calling thread, with a team of `threads` threads, the caller included,
// that stays ready for the regions which the task begins.
void run_with_team(Task task, void* data, int threads);
int thread_index();
int thread_count();
void barrier();

namespace {  // compiled once per level, and not to be merged with another level's

// A work list shared by the threads of one region.
class Counter {
 public:
  // Claims the next piece of at most `step` of `limit` items; false when none is left. All threads
  // pass the same limit.
  bool take(long limit, long step, long* begin, long* end) {
    long at = __atomic_fetch_add(&next_, step, __ATOMIC_RELAXED);
    if (at >= limit) return false;
    *begin = at;
    *end = at + step < limit ? at + step : limit;
    return true;
  }
  // Starts again from the first item. To be called by one thread, between barriers.
  void begin_anew() { __atomic_store_n(&next_, 0, __ATOMIC_RELAXED); }

 private:
  long next_ = 0;
};

template <typename Body>
void parallel(int threads, Body body) {
  if (threads <= 1) {
    body();
    return;
  }
  run_parallel([](void* data) { (*static_cast<Body*>(data))(); }, &body, threads);
}

template <typename Body>
void with_team(int threads, Body body) {
  run_with_team([](void* data) { (*static_cast<Body*>(data))(); }, &body, threads);
}

}  // namespace

}  // namespace pm
