// A multiprocessor without a GPU: runs the blocks of a launch one after the other, each thread of a block on a stack of its own, in the
// thread that launches. Threads run until they wait for each other; who goes on first is drawn by lot. So code is checked, and not the
// memory model: everything that a thread has written is seen by whoever runs after it.
//
// Found and reported, with kernel, block, thread and line: threads of a block or lanes of a warp that wait at different places, or of
// which some have ended; warps that all wait for something that no other will do; writes in front of and behind dynamic shared memory;
// accesses that no process may make. Shared memory is all ones, thus NaN, when a block begins. Built with REPLAYSSM_RACES, accesses to shared
// memory that nothing orders, too: races.h.
#pragma once
#include "races.h"

namespace emulated {

// A line of a kernel.
struct Site {
  const char *file;
  int line;
};

struct Index {
  unsigned x, y, z;
};

// Of the thread that runs.
extern Index thread_index, block_index, block_size, grid_size;

// Waits for all threads of the block; returns whether any of them brought a value that is not zero.
int wait_for_block(int value, Site site);

// Waits for all lanes of the warp, each of which brings a value. They are found from the returned address on, lane by lane, until the lane
// waits for the next but one time.
const unsigned long long *wait_for_warp(unsigned mask, unsigned long long value, Site site);

// The same with more of each lane.
struct Words {
  unsigned word[6];
};
const Words *exchange(const Words &mine, Site site);

// Waits for all lanes of the warp, and then until a condition holds for each of them. Nobody switches to a warp that would only look and wait.
typedef bool (*Condition)(const void *at, unsigned value);
void wait_until(Condition holds, const void *at, unsigned value, Site site);

// Lanes of this thread's warp.
unsigned lanes_of_warp();

// Ends the launch with an error, in the name of the thread that runs.
[[noreturn]] void fail(const char *what, Site site);

// A kernel, as its translation unit announces it.
struct Kernel {
  const char *name;
  // Calls it with the address of its parameters.
  void (*call)(const void *params);
  unsigned params_bytes;
  // Static shared memory.
  char *shared;
  char *shared_end;
  Kernel *next;

  Kernel(const char *name, void (*call)(const void *), unsigned params_bytes, char *shared, char *shared_end);
};

Kernel *find(const char *name);

enum : unsigned { MOST_SHARED = 227 * 1024, MOST_THREADS = 1024 };

// Runs a launch; an error has been reported if the result is false. One at a time.
bool run(const Kernel &kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, const void *params);

}  // namespace emulated
