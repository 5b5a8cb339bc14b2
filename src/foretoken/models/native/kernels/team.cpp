#include "team.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#else
#define PAUSE() ((void)0)
#endif

namespace {

// A processor that another process holds is waited for in the kernel: spinning on would take the time that the
// thread there needs.
const int SPINS = 4000;
const auto AWAKE = std::chrono::microseconds(100);  // between passes

struct Threads {
  std::mutex turn;  // held for a run
  Team team;
  std::vector<std::thread> helpers;
  std::atomic<uint64_t> job{0};  // its number, then 16 bits of how many threads it has
  std::atomic<int> busy{0};
  std::mutex sleep;
  std::condition_variable wake;
  Work work = nullptr;
  void* what = nullptr;
};

Threads* threads = nullptr;  // never freed: its threads end with the process
std::mutex making;

void help(Threads* all, int me, uint64_t seen) {
  for (;;) {
    const auto until = std::chrono::steady_clock::now() + AWAKE;
    int spins = 0;
    while (all->job.load(std::memory_order_acquire) == seen) {
      if (++spins % 64) {
        PAUSE();
      } else if (std::chrono::steady_clock::now() > until) {
        std::unique_lock<std::mutex> lock(all->sleep);
        all->wake.wait(lock, [&] { return all->job.load() != seen; });
      }
    }
    seen = all->job.load(std::memory_order_acquire);
    if (me < int(seen & 0xffff)) {
      all->work(all->what, all->team, me);
      all->busy.fetch_sub(1, std::memory_order_release);
    }
  }
}

void after_fork() {  // a child has no threads but the one that forked
  threads = nullptr;
  new (&making) std::mutex;
}

Threads* ready() {
  std::lock_guard<std::mutex> lock(making);
  if (!threads) {
    static const int once = pthread_atfork(nullptr, nullptr, after_fork);
    (void)once;
    threads = new Threads;
  }
  return threads;
}

}  // namespace

bool Team::take(int me, int count, int grain, int* first, int* last) {
  Counter* of_phase = counters[phase.load(std::memory_order_relaxed) & 1];
  for (int i = 0; i < size; i++) {
    const int whose = me + i < size ? me + i : me + i - size;
    const int begin = int(int64_t(count) * whose / size);
    const int end = int(int64_t(count) * (whose + 1) / size);
    if (of_phase[whose].taken.load(std::memory_order_relaxed) >= end - begin) continue;
    const int at = of_phase[whose].taken.fetch_add(grain, std::memory_order_relaxed);
    if (at >= end - begin) continue;
    *first = begin + at;
    *last = at + grain < end - begin ? begin + at + grain : end;
    return true;
  }
  return false;
}

void Team::meet() {
  const int now = phase.load(std::memory_order_relaxed);
  if (arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
    // everybody has left this phase's counters; the next phase's were reset one phase ago
    for (int i = 0; i < size; i++) counters[now & 1][i].taken.store(0, std::memory_order_relaxed);
    arrived.store(0, std::memory_order_relaxed);
    phase.store(now + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; phase.load(std::memory_order_acquire) == now; spins++)
    if (spins < SPINS)
      PAUSE();
    else
      sched_yield();
}

void run_in_team(int size, Work work, void* what) {
  Threads* all = ready();
  std::lock_guard<std::mutex> lock(all->turn);
  while (int(all->helpers.size()) < size - 1) {
    const int me = int(all->helpers.size()) + 1;
    all->helpers.emplace_back(help, all, me, all->job.load());
    all->helpers.back().detach();
  }
  all->team.size = size;
  for (auto& set : all->team.counters)
    for (int i = 0; i < size; i++) set[i].taken.store(0, std::memory_order_relaxed);
  all->work = work;
  all->what = what;
  all->busy.store(size - 1, std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> awake(all->sleep);
    all->job.store(((all->job.load() >> 16) + 1) << 16 | uint64_t(size), std::memory_order_release);
  }
  if (size > 1) all->wake.notify_all();
  work(what, all->team, 0);
  for (int spins = 0; all->busy.load(std::memory_order_acquire); spins++)
    if (spins < SPINS)
      PAUSE();
    else
      sched_yield();
}
