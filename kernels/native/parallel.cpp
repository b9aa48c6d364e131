#include "parallel.h"

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

struct Region {
  pm::Task task;
  void* data;
};

void enter(void* data) {
  Region* region = static_cast<Region*>(data);
  inside = true;
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
  Region region{task, data};
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
