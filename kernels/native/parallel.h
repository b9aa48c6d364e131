// Threads are borrowed: the process hands over the entry points of the OpenMP runtime it has
// loaded already (torch's own). Without one everything runs on the calling thread.
//
// Between regions threads sleep after a few microseconds, and the first to need them pays some
// 35 us to wake them; where cores are shared, it may then wait a time slice for the last of them.
// So whatever takes one thread less than about 80 us stays on one. Results do not depend on it.
// Within a region, and between those of a team, they look out for each other longer (patience.h).
#pragma once

namespace pm {

using Task = void (*)(void* data);

// Runs task(data) on at most `threads` threads at once, the caller included, and returns when
// all are done. Inside, thread_index() tells them apart and barrier() waits for all of them. A region
// within a region is its thread's alone.
void run_parallel(Task task, void* data, int threads);
// Runs task(data) on the calling thread, with a team of `threads`, itself included, that stays at
// hand for the regions that it begins.
void run_with_team(Task task, void* data, int threads);
int thread_index();
int thread_count();
void barrier();

namespace {  // compiled once per level: no level's code may stand in for another's

// A work list shared by the threads of one region.
class Counter {
 public:
  // The next piece of at most `step` of `limit` items; false when none is left. Everybody
  // gives the same limit.
  bool take(long limit, long step, long* begin, long* end) {
    long at = __atomic_fetch_add(&next_, step, __ATOMIC_RELAXED);
    if (at >= limit) return false;
    *begin = at;
    *end = at + step < limit ? at + step : limit;
    return true;
  }
  // Between barriers, by one thread: what follows takes from the beginning again.
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
