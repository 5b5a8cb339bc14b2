// A team of threads that runs one pass at a time. Threads spin while they wait within a pass, and sleep between passes.
#pragma once
#include <stdint.h>

#include <atomic>

enum { MOST_THREADS = 256 };

struct alignas(64) Counter {
  std::atomic<int> taken;
};

// The shared state of the threads of a run. A phase ends when all threads have called meet().
struct Team {
  int size;
  std::atomic<int> arrived{0};
  std::atomic<unsigned> phase{0};
  Counter counters[2][MOST_THREADS];

  void meet();

  // Take up to `grain` of the `count` pieces of this phase's work, first to last - 1: of the thread's own share first,
  // then of the others'. Return false if none is left
  bool take(int me, int count, int grain, int* first, int* last);
};

typedef void (*Work)(void* what, Team& team, int me);

// Run work(what, team, me) in `wanted` threads, including this one, and wait for all. Fewer threads are used for a
// while if other processes occupy the processors, as the slowest thread determines the time. A process does one run at
// a time; other callers wait. Return false if the system gives no more threads.
bool run_in_team(int wanted, Work work, void* what);
