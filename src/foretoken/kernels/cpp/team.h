// A team of threads that works on one pass at a time: it spins between the parts of a pass and sleeps between passes.
#pragma once
#include <stdint.h>

#include <atomic>

enum { MOST_THREADS = 256 };

struct alignas(64) Counter {
  std::atomic<int> taken;
};

// What the threads of a running pass share. A phase ends where all have met.
struct Team {
  int size;
  std::atomic<int> arrived{0};
  std::atomic<unsigned> phase{0};
  Counter counters[2][MOST_THREADS];

  void meet();

  // Take up to `grain` of `count` pieces of this phase's work: a thread's own part first, then what others have
  // left; false once nothing is left
  bool take(int me, int count, int grain, int* first, int* last);
};

typedef void (*Work)(void* what, Team& team, int me);

// Run work(what, team, me) in so many threads, this one included, and wait for all; in fewer for a while where another
// process holds the processors, as a run is as slow as its slowest thread. One run at a time per process:
// others wait for their turn. False where the system gives no more threads.
bool run_in_team(int wanted, Work work, void* what);
