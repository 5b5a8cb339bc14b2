// The threads of a team: helpers are started when first needed and never end. See team.h.
#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#else
#define PAUSE() ((void)0)
#endif

namespace {

// Spins before a waiting thread yields: another process may occupy a processor that a thread of the team needs.
const int SPINS = 4000;
// In nanoseconds. AWAKE: how long threads spin between runs before they sleep. LATE: a longer wait shows that another
// process occupies a processor. Runs then use fewer threads, for FIRST_REST, and twice as long each time it recurs, up
// to LONGEST_REST
const int64_t AWAKE = 100000, LATE = 1000000, FIRST_REST = 8000000, LONGEST_REST = 256000000;

struct Threads {
  pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;  // held for a run
  pthread_mutex_t sleep = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
  Team team;
  int helpers = 0;
  std::atomic<uint64_t> job{0};  // a counter of runs, then 16 bits for the run's number of threads
  std::atomic<int> busy{0};
  std::atomic<bool> late{false};  // whether a wait of this run took longer than LATE
  int spared = 0;  // runs use this many threads fewer, until time `until`
  int64_t rest = 0, until = 0;
  Work work = nullptr;
  void* what = nullptr;
};

Threads all;

// After a fork, the child has only the forking thread: start with fresh locks and no helpers
const int forked = pthread_atfork(nullptr, nullptr, [] { new (&all) Threads; });

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// Wait for a job other than `seen`: spin, then sleep
uint64_t job_after(uint64_t seen) {
  const int64_t until = now() + AWAKE;
  for (unsigned spins = 1; all.job.load(std::memory_order_acquire) == seen; spins++) {
    if (spins % 64) {
      PAUSE();
    } else if (now() > until) {
      pthread_mutex_lock(&all.sleep);
      while (all.job.load() == seen) pthread_cond_wait(&all.wake, &all.sleep);
      pthread_mutex_unlock(&all.sleep);
    }
  }
  return all.job.load(std::memory_order_acquire);
}

// The body of helper thread `number`
void* help(void* number) {
  const int me = int(intptr_t(number));
  for (uint64_t seen = 0;;) {
    seen = job_after(seen);
    if (me >= int(seen & 0xffff)) continue;
    all.work(all.what, all.team, me);
    all.busy.fetch_sub(1, std::memory_order_release);
  }
}

// Add a thread that blocks all signals; return false if the system gives no more threads
bool add_helper() {
  sigset_t every, before;
  sigfillset(&every);
  pthread_sigmask(SIG_SETMASK, &every, &before);
  pthread_t thread;
  const bool made = !pthread_create(&thread, nullptr, help, (void*)intptr_t(all.helpers + 1));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (made) pthread_detach(thread);
  all.helpers += made;
  return made;
}

// Spin, then yield, until done()
template <class Done>
void wait_until(const Done& done) {
  int64_t since = 0;
  for (int spins = 0; !done(); spins++) {
    if (spins < SPINS) {
      PAUSE();
      continue;
    }
    since = since ? since : now();
    sched_yield();
  }
  if (since && now() - since > LATE) all.late.store(true, std::memory_order_relaxed);
}

// Return the number of threads of the next run, at most `size`
int team_size(int size) {
  if (all.spared && now() > all.until) all.spared = 0;  // try with all threads again
  return size > all.spared ? size - all.spared : 1;
}

// Update the number of spared threads after a run
void judge(int size, int wanted) {
  if (all.late.exchange(false, std::memory_order_relaxed)) {
    all.rest = all.rest ? (2 * all.rest < LONGEST_REST ? 2 * all.rest : LONGEST_REST) : FIRST_REST;
    all.spared = wanted - size + 1;
    all.until = now() + all.rest;
  } else if (size == wanted) {
    all.rest = all.rest > FIRST_REST ? all.rest / 2 : 0;
  }
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
  const unsigned here = phase.load(std::memory_order_relaxed);
  if (arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
    // no thread uses this phase's counters any more; those of the next phase were reset one phase ago
    for (int i = 0; i < size; i++) counters[here & 1][i].taken.store(0, std::memory_order_relaxed);
    arrived.store(0, std::memory_order_relaxed);
    phase.store(here + 1, std::memory_order_release);
    return;
  }
  wait_until([&] { return phase.load(std::memory_order_acquire) != here; });
}

bool run_in_team(int wanted, Work work, void* what) {
  pthread_mutex_lock(&all.turn);
  const int size = team_size(wanted);
  bool enough = true;
  while (enough && all.helpers < size - 1) enough = add_helper();
  if (enough) {
    all.team.size = size;
    for (auto& set : all.team.counters)
      for (int i = 0; i < size; i++) set[i].taken.store(0, std::memory_order_relaxed);
    all.work = work;
    all.what = what;
    all.busy.store(size - 1, std::memory_order_relaxed);
    pthread_mutex_lock(&all.sleep);
    all.job.store(((all.job.load() >> 16) + 1) << 16 | uint64_t(size), std::memory_order_release);
    pthread_mutex_unlock(&all.sleep);
    if (size > 1) pthread_cond_broadcast(&all.wake);
    work(what, all.team, 0);
    wait_until([] { return !all.busy.load(std::memory_order_acquire); });
    judge(size, wanted);
  }
  pthread_mutex_unlock(&all.turn);
  return enough;
}
