#include "parallel.h"

#ifdef __linux__
#include <sched.h>
#include <sys/resource.h>
#endif

#include "clock.h"
#include "gathering.h"
#include "pagemesh_native.h"

namespace {

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using Query = int (*)();

Parallel lent_parallel = nullptr;
Query lent_index = nullptr;
Query lent_count = nullptr;
Query lent_cores = nullptr;
thread_local bool binds = false;  // whether threads of this one's regions are pinned

struct Region {
  pm::Task task;
  void* data;
  bool bound;
  int threads = 0;  // of a team: how many take part
  pm::Gathering gathering;
};

// A thread's place in a region; no region: it runs alone.
struct Place {
  Region* region = nullptr;
  int index = 0, count = 1;
};
thread_local Place here;

// Threads that stay together for all regions that the first of them begins. `region`: the region
// that begins next; null: the team ends.
struct Team {
  pm::Task task;
  void* data;
  bool bound;
  int threads = 0;
  Region* region = nullptr;
  pm::Gathering begins, ends;
};
thread_local Team* own_team = nullptr;  // set on the team's first thread only

#ifdef __linux__
// The cores of the threads of pinned regions. A thread pins itself when it enters a region, since
// only then is its index known, and a thread created late starts on the core of the one that
// created it.
struct Cores {
  unsigned version = 0;  // 0: no thread was ever pinned
  int count = 0;
  int cores[CPU_SETSIZE];
  cpu_set_t everywhere;
} cores_of_threads;
thread_local unsigned settled_version = 0;
thread_local int settled_core = -1;

void settle(int index) {
  const Cores& all = cores_of_threads;
  const int core = index < all.count ? all.cores[index] : -1;
  if (settled_version == all.version && settled_core == core) return;
  settled_version = all.version;
  settled_core = core;
  cpu_set_t one;
  CPU_ZERO(&one);
  if (core >= 0) CPU_SET(core, &one);
  // If this is not permitted the thread stays where it is, which is slower but correct.
  sched_setaffinity(0, sizeof(cpu_set_t), core >= 0 ? &one : &all.everywhere);
}

// How many cores the process may use; 0 if unknown. The calling thread itself may be pinned to one
// of them, by us or by the OpenMP runtime, which then knows their number.
int usable_cores() {
  cpu_set_t usable = cores_of_threads.everywhere;
  if (!cores_of_threads.version && sched_getaffinity(0, sizeof(usable), &usable) != 0) return 0;
  const int known = lent_cores(), free_to_run = CPU_COUNT(&usable);
  return known > free_to_run ? known : free_to_run;
}

double used_us() {
  timespec used;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) * 1e6 + static_cast<double>(used.tv_nsec) * 1e-3;
}

// How often the calling thread was preempted (involuntary context switches).
long leave_count() {
  rusage usage;
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nivcsw;
}

// Reports to patience() the time that the calling thread loses to preemption between construction
// and end().
class Losses {
 public:
  void end() const {
    const long count = leave_count() - leave_count_;
    if (!count) return;
    const double at_us = pm::now_us(), slept_us = pm::slept_us() - slept_us_;
    pm::patience().lost(at_us - since_us_ - (used_us() - used_us_) - slept_us, count, at_us);
  }

 private:
  const long leave_count_ = leave_count();
  const double since_us_ = pm::now_us(), used_us_ = used_us(), slept_us_ = pm::slept_us();
};
#else
void settle(int) {}
int usable_cores() { return 0; }  // unknown, like what threads lose to preemption

class Losses {
 public:
  void end() const {}
};
#endif

void take_part(const Place& place) {
  const Losses losses;
  here = place;
  place.region->task(place.region->data);
  here = Place();
  losses.end();
}

void enter(void* data) {
  Region* region = static_cast<Region*>(data);
  const int index = lent_index();
  if (region->bound) settle(index);
  take_part({region, index, lent_count()});
}

void enter_team(void* data) {
  Team* team = static_cast<Team*>(data);
  const int index = lent_index(), count = lent_count();
  if (team->bound) settle(index);
  if (index == 0) {
    team->threads = count;
    own_team = team;
    team->task(team->data);
    own_team = nullptr;
    team->region = nullptr;
    team->begins.wait(count);
    return;
  }
  while (true) {
    team->begins.wait(count);
    Region* region = team->region;
    if (!region) return;
    if (index < region->threads) take_part({region, index, region->threads});
    team->ends.wait(count);
  }
}

void run_in_team(Team* team, Region* region) {
  team->region = region;
  team->begins.wait(team->threads);
  take_part({region, 0, region->threads});
  team->ends.wait(team->threads);
}

}  // namespace

namespace pm {

void run_parallel(Task task, void* data, int threads) {
  if (own_team && threads > own_team->threads) threads = own_team->threads;
  if (!lent_parallel || threads <= 1 || here.region) {
    const Place outer = here;
    here = {outer.region, 0, 1};
    task(data);
    here = outer;
    return;
  }
  Region region{task, data, binds, threads, {}};
  if (own_team) {
    run_in_team(own_team, &region);
  } else {
    lent_parallel(enter, &region, static_cast<unsigned>(threads), 0);
  }
}

void run_with_team(Task task, void* data, int threads) {
  if (!lent_parallel || threads <= 1 || here.region || own_team) {
    task(data);
    return;
  }
  Team team{task, data, binds, 0, nullptr, {}, {}};
  lent_parallel(enter_team, &team, static_cast<unsigned>(threads), 0);
}

int thread_index() { return here.index; }
int thread_count() { return here.count; }
void barrier() {
  if (here.count > 1) here.region->gathering.wait(here.count);
}

}  // namespace pm

extern "C" PM_EXPORT void pm_lend_threads(void* parallel, void* index, void* count,
                                          void* cores) {
  lent_cores = reinterpret_cast<Query>(cores);
  lent_index = reinterpret_cast<Query>(index);
  lent_count = reinterpret_cast<Query>(count);
  lent_parallel = reinterpret_cast<Parallel>(parallel);
  pm::patience().set_cores(usable_cores());
}

extern "C" PM_EXPORT void pm_bind_threads(const int* cores, int count) {
#ifdef __linux__
  Cores& all = cores_of_threads;
  binds = true;
  if (!all.version) sched_getaffinity(0, sizeof(cpu_set_t), &all.everywhere);
  if (count > CPU_SETSIZE) count = 0;
  for (int i = 0; i < count; ++i) {
    if (cores[i] < 0 || cores[i] >= CPU_SETSIZE) count = 0;
    else all.cores[i] = cores[i];
  }
  all.count = count;
  ++all.version;
  settle(0);
#else
  (void)cores;
  (void)count;
#endif
}
