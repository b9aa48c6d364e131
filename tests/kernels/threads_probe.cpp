// parallel.cpp and gathering.cpp by themselves, for test_threads.py.
#include <time.h>

#include <thread>
#include <vector>

#include "../../kernels/native/gathering.h"
#include "../../kernels/native/parallel.h"

extern "C" {

double patience_long_us() { return pm::Patience::kLongUs; }
double patience_brief_us() { return pm::Patience::kBriefUs; }
pm::Patience* patience_new(int cores) { return new pm::Patience(cores); }
void patience_delete(pm::Patience* patience) { delete patience; }
double patience_look_us(const pm::Patience* patience, int threads, double now_us) {
  return patience->look_us(threads, now_us);
}
void patience_lost(pm::Patience* patience, double lost_us, long times, double now_us) {
  patience->lost(lost_us, times, now_us);
}

void pm_lend_threads(void* parallel, void* index, void* count, void* cores);

// A runtime that gives no more than `runtime_threads` threads, and that a sanitizer sees through.
static int runtime_threads = 0;
static thread_local int runtime_index = 0, runtime_count = 1;

static void runtime_parallel(void (*task)(void*), void* data, unsigned asked, unsigned) {
  const int count = static_cast<int>(asked) < runtime_threads ? static_cast<int>(asked)
                                                              : runtime_threads;
  auto run = [=](int own) {
    runtime_index = own;
    runtime_count = count;
    task(data);
    runtime_index = 0;
    runtime_count = 1;
  };
  std::vector<std::thread> others;
  for (int i = 1; i < count; ++i) others.emplace_back(run, i);
  run(0);
  for (std::thread& other : others) other.join();
}
static int get_runtime_index() { return runtime_index; }
static int get_runtime_count() { return runtime_count; }
static int get_runtime_cores() { return runtime_threads; }

void lend_own_runtime(int threads) {
  runtime_threads = threads;
  pm_lend_threads(reinterpret_cast<void*>(runtime_parallel),
                  reinterpret_cast<void*>(get_runtime_index),
                  reinterpret_cast<void*>(get_runtime_count),
                  reinterpret_cast<void*>(get_runtime_cores));
}

double own_look_us(int threads) { return pm::patience().look_us(threads, 0); }

// How often a thread found, after it had met the others, that one of them had not counted yet, or
// was ahead of it. With `pause_us` another one of them is late each time.
long gathering_strays(int threads, long meetings, long pause_us) {
  pm::Gathering gathering;
  std::vector<long> counted(static_cast<size_t>(threads), 0);
  std::vector<long> strays(static_cast<size_t>(threads), 0);
  auto meet = [&](int own) {
    for (long i = 0; i < meetings; ++i) {
      if (pause_us && i % threads == own) {
        const timespec pause = {0, pause_us * 1000};
        nanosleep(&pause, nullptr);
      }
      ++counted[static_cast<size_t>(own)];
      gathering.wait(threads);
      for (long other : counted) strays[static_cast<size_t>(own)] += other != i + 1;
      gathering.wait(threads);
    }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(meet, i);
  meet(0);
  for (std::thread& other : others) other.join();
  long sum = 0;
  for (long stray : strays) sum += stray;
  return sum;
}

// Each thread of a region writes 1 + its index to `indices`, and how many it counted before and
// after a barrier to `before` and `after`.
void region(int threads, int* indices, int* before, int* after) {
  int arrived = 0;
  pm::parallel(threads, [&] {
    const int own = pm::thread_index();
    indices[own] = 1 + own;
    before[own] = __atomic_add_fetch(&arrived, 1, __ATOMIC_RELAXED);
    pm::barrier();
    after[own] = __atomic_load_n(&arrived, __ATOMIC_RELAXED);
    pm::parallel(threads, [&] { after[own] += 100 * pm::thread_count(); });
  });
}

// The same for `regions` of them by one team of `team` threads; the arrays are those of the last.
void team_regions(int team, int threads, long regions, int* indices, int* before, int* after) {
  pm::with_team(team, [&] {
    for (long i = 0; i < regions; ++i) region(threads, indices, before, after);
  });
}

}  // extern "C"
