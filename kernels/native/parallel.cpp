#include "parallel.h"

#ifdef __linux__
#include <sched.h>
#endif

#include "pagemesh_native.h"

namespace {

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using Query = int (*)();
using Wait = void (*)();

Parallel lent_parallel = nullptr;
Query lent_index = nullptr;
Query lent_count = nullptr;
Wait lent_barrier = nullptr;
thread_local bool inside = false;
thread_local bool binds = false;  // whether the threads of this one's regions have places

struct Region {
  pm::Task task;
  void* data;
  bool bound;
};

#ifdef __linux__
// Where the threads of bound regions run. A thread moves when it enters a region, since only it
// knows its number, and one that was made late begins on the core of whoever made it.
struct Places {
  unsigned version = 0;  // 0: nobody was ever bound
  int count = 0;
  int cores[CPU_SETSIZE];
  cpu_set_t everywhere;
} places;
thread_local unsigned settled_version = 0;
thread_local int settled_core = -1;

void settle(int index) {
  const int core = index < places.count ? places.cores[index] : -1;
  if (settled_version == places.version && settled_core == core) return;
  settled_version = places.version;
  settled_core = core;
  cpu_set_t one;
  CPU_ZERO(&one);
  if (core >= 0) CPU_SET(core, &one);
  // Where it is not allowed the thread stays where it is: slower, and right all the same.
  sched_setaffinity(0, sizeof(cpu_set_t), core >= 0 ? &one : &places.everywhere);
}
#endif

void enter(void* data) {
  Region* region = static_cast<Region*>(data);
  inside = true;
#ifdef __linux__
  if (region->bound) settle(lent_index());
#endif
  region->task(region->data);
  inside = false;
}

}  // namespace

namespace pm {

void run_parallel(Task task, void* data, int threads) {
  if (!lent_parallel || threads <= 1 || inside) {
    task(data);
    return;
  }
  Region region{task, data, binds};
  lent_parallel(enter, &region, static_cast<unsigned>(threads), 0);
}

int thread_index() { return inside ? lent_index() : 0; }
int thread_count() { return inside ? lent_count() : 1; }
void barrier() {
  if (inside) lent_barrier();
}

}  // namespace pm

extern "C" PM_EXPORT void pm_lend_threads(void* parallel, void* index, void* count,
                                          void* barrier) {
  lent_index = reinterpret_cast<Query>(index);
  lent_count = reinterpret_cast<Query>(count);
  lent_barrier = reinterpret_cast<Wait>(barrier);
  lent_parallel = reinterpret_cast<Parallel>(parallel);
}

extern "C" PM_EXPORT void pm_bind_threads(const int* cores, int count) {
#ifdef __linux__
  binds = true;
  if (!places.version) sched_getaffinity(0, sizeof(cpu_set_t), &places.everywhere);
  if (count > CPU_SETSIZE) count = 0;
  for (int i = 0; i < count; ++i) {
    if (cores[i] < 0 || cores[i] >= CPU_SETSIZE) count = 0;
    else places.cores[i] = cores[i];
  }
  places.count = count;
  ++places.version;
  settle(0);
#else
  (void)cores;
  (void)count;
#endif
}
