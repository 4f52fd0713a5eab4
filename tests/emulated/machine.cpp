#include "machine.h"

#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <sys/mman.h>

namespace emulated {

Index thread_index, block_index, block_size, grid_size;

namespace {

enum { WARP = 32, STACK = 128 << 10, PAGE = 4096, GUARD = 4096 };

enum State { RUNS, AT_WARP, AT_BLOCK, ENDED };

struct Thread {
  void *stack_pointer;
  State state;
  Site site;
  int vote;
  // Which of the two rows of values its next exchange uses.
  unsigned turn;
  // What it waits for, or null.
  Condition holds;
  const void *at;
  unsigned value;
};

Kernel *kernels;
Thread threads[MOST_THREADS];
unsigned long long values[2][MOST_THREADS];
Words words[2][MOST_THREADS];
char *stacks;
unsigned n_threads, current;
int any;
const Kernel *kernel;
const void *arguments;
void *scheduler;
sigjmp_buf on_fault;
// Whether this thread of the process is in a launch.
thread_local bool is_device;
unsigned long long lots;

// Saves what a call must keep and the stack pointer, and goes on on another stack.
extern "C" void emulated_switch(void **from, void *to);
asm(R"(
.text
.globl emulated_switch
.hidden emulated_switch
.type emulated_switch, @function
emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulated_switch, . - emulated_switch

.bss
.balign 4096
.globl emulated_shared_guard, emulated_shared_memory
.hidden emulated_shared_guard, emulated_shared_memory
emulated_shared_guard:
  .zero 4096
emulated_shared_memory:
  .zero 227 * 1024 + 4096
.text
)");
// Dynamic shared memory; guards are in front of it and behind what the launch has of it.
extern "C" __attribute__((visibility("hidden"))) char emulated_shared_guard[], emulated_shared_memory[];

unsigned common_divisor(unsigned a, unsigned b) { return b == 0 ? a : common_divisor(b, a % b); }

unsigned lot(unsigned n) {
  lots = lots * 6364136223846793005ull + 1442695040888963407ull;
  return (unsigned)((lots >> 32) * n >> 32);
}

void leave(State state, Site site) {
  threads[current].state = state;
  threads[current].site = site;
  emulated_switch(&threads[current].stack_pointer, scheduler);
}

void enter() {
  kernel->call(arguments);
  leave(ENDED, {"", 0});
}

void report(const char *what, unsigned thread, Site site) {
  fprintf(stderr, "emulated device: %s, block %u, thread %u: %s", kernel->name, block_index.x, thread, what);
  if (site.line) fprintf(stderr, " (%s:%d)", site.file, site.line);
  fputc('\n', stderr);
}

bool same(const Thread &a, const Thread &b) {
  return a.state == b.state && a.site.line == b.site.line && (a.site.file == b.site.file || !strcmp(a.site.file, b.site.file));
}

bool parted(unsigned one, unsigned other, const char *of) {
  char text[600];
  auto say = [](const Thread &t, char *to, size_t n) {
    if (t.state == ENDED) {
      snprintf(to, n, "has ended");
    } else {
      snprintf(to, n, "waits for its %s at %s:%d", t.state == AT_WARP ? "warp" : "block", t.site.file, t.site.line);
    }
  };
  char a[250], b[250];
  say(threads[one], a, sizeof a);
  say(threads[other], b, sizeof b);
  snprintf(text, sizeof text, "threads of a %s part: this one %s, thread %u %s", of, a, other, b);
  report(text, one, {"", 0});
  return false;
}

// Runs the lanes of a warp until all of them wait or have ended. False: they do so at different places.
bool step(unsigned first, unsigned n) {
  unsigned start = lot(n);
  bool backwards = lot(2);
  for (unsigned k = 0; k < n; k++) {
    unsigned lane = first + (backwards ? start + n - k : start + k) % n;
    current = lane;
    thread_index.x = lane;
    emulated_switch(&scheduler, threads[lane].stack_pointer);
  }
  for (unsigned i = first + 1; i < first + n; i++)
    if (!same(threads[first], threads[i])) return parted(first, i, "warp");
  if (threads[first].state == AT_WARP)
    for (unsigned i = first; i < first + n; i++) threads[i].state = RUNS;
  if (threads[first].state == RUNS) races::warp_meets(first / WARP);
  return true;
}

// Whether a warp waits for something that is still to come, for all of its lanes.
bool waits(unsigned first) {
  unsigned n = n_threads - first < WARP ? n_threads - first : (unsigned)WARP;
  for (unsigned i = first; i < first + n; i++)
    if (!threads[i].holds || threads[i].holds(threads[i].at, threads[i].value)) return false;
  return true;
}

bool stuck(unsigned first) {
  report("waits for what no thread will do", first, threads[first].site);
  return false;
}

void prepare(unsigned i) {
  void **top = (void **)(stacks + (size_t)(i + 1) * STACK);
  // What emulated_switch takes off: six registers and where to go on; then an address to return to, which nobody does.
  void **at = top - 8;
  memset(at, 0, 8 * sizeof(void *));
  at[6] = (void *)enter;
  threads[i] = Thread{at, RUNS, {"", 0}, 0, 0, nullptr, nullptr, 0};
}

bool run_block(unsigned shared_bytes) {
  memset(emulated_shared_memory, 0xFF, shared_bytes);
  memset(kernel->shared, 0xFF, (size_t)(kernel->shared_end - kernel->shared));
  for (unsigned i = 0; i < n_threads; i++) prepare(i);
  unsigned n_warps = (n_threads + WARP - 1) / WARP;
  races::begin(n_warps, emulated_shared_memory, shared_bytes, kernel->shared, (unsigned)(kernel->shared_end - kernel->shared));
  unsigned runnable[MOST_THREADS / WARP];
  for (;;) {
    unsigned n = 0;
    for (unsigned w = 0; w < n_warps; w++) runnable[n++] = w;
    while (n > 0) {
      unsigned k = lot(n), passed = 0;
      for (; passed < n && waits(runnable[k] * WARP); passed++) k = (k + 1) % n;
      unsigned first = runnable[k] * WARP, left = n_threads - first;
      if (passed == n) return stuck(first);
      // Mostly on to where it waits for others; sometimes another warp comes between.
      do {
        if (!step(first, left < WARP ? left : (unsigned)WARP)) return false;
      } while (threads[first].state == RUNS && !waits(first) && lot(8) > 0);
      if (threads[first].state != RUNS) runnable[k] = runnable[--n];
    }
    for (unsigned i = 1; i < n_threads; i++)
      if (!same(threads[0], threads[i])) return parted(0, i, "block");
    if (threads[0].state == ENDED) return true;
    races::block_meets();
    any = 0;
    for (unsigned i = 0; i < n_threads; i++) {
      any |= threads[i].vote;
      threads[i].state = RUNS;
    }
  }
}

// Whether nothing was written around dynamic shared memory.
bool guards_hold(unsigned shared_bytes) {
  for (int behind = 0; behind < 2; behind++) {
    char *guard = behind ? emulated_shared_memory + shared_bytes : emulated_shared_guard;
    for (int i = 0; i < GUARD; i++) {
      if (guard[i] == (char)0xFF) continue;
      char text[120];
      snprintf(text, sizeof text, "byte %d of shared memory was written; the launch has %u", behind ? (int)shared_bytes + i : i - GUARD,
               shared_bytes);
      report(text, 0, {"", 0});
      return false;
    }
  }
  return true;
}

// Another thread's fault is not a kernel's: it comes again, and ends the process.
void on_signal(int number) {
  if (is_device) siglongjmp(on_fault, number);
  signal(number, SIG_DFL);
}

void start() {
  size_t bytes = (size_t)MOST_THREADS * STACK;
  void *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) abort();
  stacks = (char *)at;
  for (size_t i = 0; i < MOST_THREADS; i++) mprotect(stacks + i * STACK, PAGE, PROT_NONE);
  const char *seed = getenv("REPLAYSSM_TEST_SEED");
  lots = seed ? strtoull(seed, nullptr, 10) : 1;
}

}  // namespace

Kernel::Kernel(const char *name, void (*call)(const void *), unsigned params_bytes, char *shared, char *shared_end)
    : name(name), call(call), params_bytes(params_bytes), shared(shared), shared_end(shared_end), next(kernels) {
  kernels = this;
}

Kernel *find(const char *name) {
  Kernel *k = kernels;
  while (k && strcmp(k->name, name) != 0) k = k->next;
  return k;
}

int wait_for_block(int value, Site site) {
  threads[current].vote = value;
  leave(AT_BLOCK, site);
  return any;
}

unsigned lanes_of_warp() {
  unsigned left = n_threads - current / WARP * WARP;
  return left < WARP ? left : (unsigned)WARP;
}

const unsigned long long *wait_for_warp(unsigned mask, unsigned long long value, Site site) {
  unsigned all = lanes_of_warp() == WARP ? ~0u : (1u << lanes_of_warp()) - 1;
  if ((mask & all) != all) fail("a part of a warp waits, which is not emulated", site);
  unsigned turn = threads[current].turn++ % 2;
  values[turn][current] = value;
  leave(AT_WARP, site);
  return values[turn] + current / WARP * WARP;
}

const Words *exchange(const Words &mine, Site site) {
  Words *row = words[threads[current].turn % 2];
  row[current] = mine;
  wait_for_warp(~0u, 0, site);
  return row + current / WARP * WARP;
}

void wait_until(Condition holds, const void *at, unsigned value, Site site) {
  Thread &thread = threads[current];
  do {
    thread.at = at;
    thread.value = value;
    thread.holds = holds;
    wait_for_warp(~0u, 0, site);
    thread.holds = nullptr;
  } while (!holds(at, value));
}

void fail(const char *what, Site site) {
  report(what, current, site);
  siglongjmp(on_fault, -1);
}

bool run(const Kernel &of, unsigned blocks, unsigned n, unsigned shared_bytes, const void *params) {
  if (!stacks) start();
  kernel = &of;
  arguments = params;
  n_threads = n;
  block_size = {n, 1, 1};
  grid_size = {blocks, 1, 1};
  memset(emulated_shared_guard, 0xFF, GUARD);
  memset(emulated_shared_memory + shared_bytes, 0xFF, GUARD);
  // A device keeps subnormals, whatever its caller's processor does.
  unsigned control = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(0x1F80);
  struct sigaction handler = {}, old[3];
  int numbers[3] = {SIGSEGV, SIGBUS, SIGFPE};
  handler.sa_handler = on_signal;
  handler.sa_flags = SA_ONSTACK;
  for (int i = 0; i < 3; i++) sigaction(numbers[i], &handler, &old[i]);
  volatile bool fine = true;
  is_device = true;
  if (int number = sigsetjmp(on_fault, 1)) {
    if (number > 0) report(number == SIGFPE ? "divided by zero" : "an access to memory that is not there", current, {"", 0});
    fine = false;
  } else {
    // All blocks, in no particular order.
    unsigned start = lot(blocks), stride = 1 + lot(blocks);
    while (common_divisor(stride, blocks) != 1) stride++;
    for (unsigned i = 0; fine && i < blocks; i++) {
      block_index = {(unsigned)((start + (unsigned long long)i * stride) % blocks), 0, 0};
      fine = run_block(shared_bytes) && guards_hold(shared_bytes);
    }
    if (races::found()) fine = false;
  }
  is_device = false;
  for (int i = 0; i < 3; i++) sigaction(numbers[i], &old[i], nullptr);
  __builtin_ia32_ldmxcsr(control);
  return fine;
}

}  // namespace emulated
