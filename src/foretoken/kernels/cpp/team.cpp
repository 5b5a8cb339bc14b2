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

// A processor that another process holds is waited for in the kernel: spinning on would take the time that the
// thread there needs.
const int SPINS = 4000;
// In nanoseconds: how long threads spin between runs; a wait after which a thread is one too many, as another process
// has its processor; how long runs do with fewer then, twice as long each time that it proves true
const int64_t AWAKE = 100000, LATE = 1000000, FIRST_REST = 8000000, LONGEST_REST = 256000000;

struct Threads {
  pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;  // held for a run
  pthread_mutex_t sleep = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
  Team team;
  int helpers = 0;
  std::atomic<uint64_t> job{0};  // its number, then 16 bits of how many threads it has
  std::atomic<int> busy{0};
  std::atomic<bool> late{false};  // whether somebody was waited for too long
  int spared = 0;  // threads that runs do without, until then
  int64_t rest = 0, until = 0;
  Work work = nullptr;
  void* what = nullptr;
};

Threads all;

// A child has no threads but the one that forked, whatever the others held
const int forked = pthread_atfork(nullptr, nullptr, [] { new (&all) Threads; });

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// Wait, in the kernel after a while, until there is another job than `seen`
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

void* help(void* number) {
  const int me = int(intptr_t(number));
  for (uint64_t seen = 0;;) {
    seen = job_after(seen);
    if (me >= int(seen & 0xffff)) continue;
    all.work(all.what, all.team, me);
    all.busy.fetch_sub(1, std::memory_order_release);
  }
}

// Add a thread, which leaves all signals to the others; false where there can be no more
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

// How many threads the next run has, of `size`
int team_size(int size) {
  if (all.spared && now() > all.until) all.spared = 0;  // are all on time again?
  return size > all.spared ? size - all.spared : 1;
}

// Learn from a run whether the processors are there
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
    // everybody has left this phase's counters; the next phase's were reset one phase ago
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
