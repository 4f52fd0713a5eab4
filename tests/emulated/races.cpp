#include "races.h"

#ifdef REPLAYSSM_RACES

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>

#include <dlfcn.h>

#include "machine.h"

namespace emulated::races {

namespace {

// Warps, and behind them the copies of each.
enum : unsigned { LANES = 32, WARPS = MOST_THREADS / LANES, AGENTS = 2 * WARPS, MOST_CELLS = (MOST_SHARED + (8 << 10)) / 2 };

struct Clock {
  unsigned of[AGENTS];
  void join(const Clock &other) {
    for (unsigned i = 0; i < AGENTS; i++)
      if (other.of[i] > of[i]) of[i] = other.of[i];
  }
};

struct Access {
  const void *code;
  // Which meeting of its warp's lanes came last.
  unsigned meeting;
  short lane;
};

// Two bytes.
struct Cell {
  unsigned block;
  unsigned writer;
  unsigned written;
  Access write;
  // By warp: its clock when it last read; the lane, or -1 where several did since they last met.
  unsigned read[WARPS];
  Access reads[WARPS];
};

struct Barrier {
  Clock pending, phases[2];
};

Cell *cells;
Clock clocks[WARPS];
unsigned copies[WARPS], meetings[WARPS], block, warps;
std::map<const void *, Barrier> barriers;
const char *starts[2];
unsigned sizes[2];
bool any, uncounted[MOST_THREADS];

unsigned thread() { return thread_index.x; }
unsigned warp() { return thread_index.x / LANES; }

Cell &cell_of(unsigned number) {
  Cell &cell = cells[number];
  if (cell.block != block) {
    memset(&cell, 0, sizeof cell);
    cell.block = block;
  }
  return cell;
}

std::string line_of(const void *code) {
  Dl_info info;
  if (!dladdr(code, &info)) return "?";
  char command[400], text[1000] = "";
  snprintf(command, sizeof command, "addr2line -Cie '%s' %#lx 2>/dev/null", info.dli_fname,
           (unsigned long)((const char *)code - (const char *)info.dli_fbase) - 1);
  if (FILE *out = popen(command, "r")) {
    size_t n = fread(text, 1, sizeof text - 1, out);
    text[n] = 0;
    pclose(out);
  }
  std::string all;
  for (char *part = strtok(text, "\n"); part; part = strtok(nullptr, "\n")) {
    const char *name = strrchr(part, '/');
    all += (all.empty() ? "" : " < ") + std::string(name ? name + 1 : part);
  }
  return all;
}

void report(const char *what, unsigned number, const Access &before, unsigned before_agent, const void *code) {
  static std::set<std::pair<const void *, const void *>> known;
  any = true;
  if (known.size() >= 40 || !known.insert({before.code, code}).second) return;
  fprintf(stderr, "emulated device: a race, block %u, thread %u: %s byte %u of shared memory, %s of warp %u, lane %d\n  now %s\n  before %s\n",
          block_index.x, thread(), what, 2 * number, before_agent < WARPS ? "an access" : "a copy", before_agent % WARPS, before.lane,
          line_of(code).c_str(), line_of(before.code).c_str());
}

// Of two bytes each, those of an access to shared memory: f of each.
template <class F>
void each(const void *at, size_t bytes, F f) {
  unsigned first = 0;
  for (int i = 0; i < 2; first += (sizes[i] + 1) / 2, i++) {
    size_t offset = (size_t)((const char *)at - starts[i]);
    if (offset >= sizes[i]) continue;
    for (size_t k = offset / 2; k <= (offset + bytes - 1) / 2 && 2 * k < sizes[i]; k++) f(first + (unsigned)k);
    return;
  }
}

void check_write(Cell &cell, unsigned number, unsigned own, const void *code) {
  const Clock &clock = clocks[own];
  if (cell.written > clock.of[cell.writer]) report("writes what was written,", number, cell.write, cell.writer, code);
  for (unsigned w = 0; w < warps; w++)
    if (w != own && cell.read[w] > clock.of[w]) report("writes what was read,", number, cell.reads[w], w, code);
  bool same = cell.read[own] && cell.reads[own].meeting == meetings[own] && cell.reads[own].lane != (short)(thread() % LANES);
  if (same) report("writes what another lane read,", number, cell.reads[own], own, code);
  same = cell.written && cell.writer == own && cell.write.meeting == meetings[own] && cell.write.lane != (short)(thread() % LANES);
  if (same) report("writes what another lane wrote,", number, cell.write, own, code);
}

void note_write(const void *at, size_t bytes, const void *code) {
  each(at, bytes, [&](unsigned number) {
    Cell &cell = cell_of(number);
    unsigned own = warp();
    check_write(cell, number, own, code);
    cell.writer = own;
    cell.written = clocks[own].of[own];
    cell.write = Access{code, meetings[own], (short)(thread() % LANES)};
    memset(cell.read, 0, sizeof cell.read);
  });
}

void note_read(const void *at, size_t bytes, const void *code) {
  if (uncounted[thread()]) return;
  each(at, bytes, [&](unsigned number) {
    Cell &cell = cell_of(number);
    unsigned own = warp();
    short lane = (short)(thread() % LANES);
    if (cell.written > clocks[own].of[cell.writer]) report("reads what was written,", number, cell.write, cell.writer, code);
    bool same = cell.written && cell.writer == own && cell.write.meeting == meetings[own] && cell.write.lane != lane;
    if (same) report("reads what another lane wrote,", number, cell.write, own, code);
    bool shared = cell.read[own] && cell.reads[own].meeting == meetings[own] && cell.reads[own].lane != lane;
    cell.read[own] = clocks[own].of[own];
    cell.reads[own] = Access{code, meetings[own], shared ? (short)-1 : lane};
  });
}

}  // namespace

void begin(unsigned n, const char *dynamic, unsigned dynamic_bytes, const char *fixed, unsigned fixed_bytes) {
  if (!cells) cells = (Cell *)calloc(MOST_CELLS, sizeof(Cell));
  if (!cells) abort();
  block++;
  warps = n;
  barriers.clear();
  memset(copies, 0, sizeof copies);
  memset(meetings, 0, sizeof meetings);
  memset(clocks, 0, sizeof clocks);
  memset(uncounted, 0, sizeof uncounted);
  for (unsigned w = 0; w < n; w++) clocks[w].of[w] = 1;
  starts[0] = dynamic, sizes[0] = dynamic_bytes;
  starts[1] = fixed, sizes[1] = fixed_bytes;
}

void block_meets() {
  Clock all = clocks[0];
  for (unsigned w = 1; w < warps; w++) all.join(clocks[w]);
  for (unsigned w = 0; w < warps; w++) {
    clocks[w] = all;
    clocks[w].of[w]++;
    meetings[w]++;
  }
}

void warp_meets(unsigned w) { meetings[w]++; }

void arrive(const void *at, bool itself, bool its_copies) {
  Barrier &b = barriers[at];
  if (itself) b.pending.join(clocks[warp()]);
  if (its_copies && copies[warp()] > b.pending.of[WARPS + warp()]) b.pending.of[WARPS + warp()] = copies[warp()];
  clocks[warp()].of[warp()]++;
}

void end_phase(const void *at, unsigned parity) {
  Barrier &b = barriers[at];
  b.phases[parity] = b.pending;
  memset(&b.pending, 0, sizeof b.pending);
}

void see_phase(const void *at, unsigned parity) { clocks[warp()].join(barriers[at].phases[parity]); }
void see_counter(const void *at) { clocks[warp()].join(barriers[at].pending); }

void copy(void *to, const void *from, unsigned bytes) {
  const void *code = __builtin_return_address(0);
  unsigned own = warp(), clock = ++copies[own];
  each(to, bytes, [&](unsigned number) {
    Cell &cell = cell_of(number);
    check_write(cell, number, own, code);
    cell.writer = WARPS + own;
    cell.written = clock;
    cell.write = Access{code, meetings[own], (short)(thread() % LANES)};
    memset(cell.read, 0, sizeof cell.read);
  });
  memcpy(to, from, bytes);
}

void copies_are_done() { clocks[warp()].of[WARPS + warp()] = copies[warp()]; }

void reads_count(bool do_count) { uncounted[thread()] = !do_count; }
bool reads_count() { return !uncounted[thread()]; }

bool found() {
  bool was = any;
  any = false;
  return was;
}

#define ACCESS(bytes)                                                                                                             \
  extern "C" void __asan_load##bytes##_noabort(const void *at) { note_read(at, bytes, __builtin_return_address(0)); }   \
  extern "C" void __asan_store##bytes##_noabort(const void *at) { note_write(at, bytes, __builtin_return_address(0)); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
extern "C" void __asan_loadN_noabort(const void *at, size_t bytes) { note_read(at, bytes, __builtin_return_address(0)); }
extern "C" void __asan_storeN_noabort(const void *at, size_t bytes) { note_write(at, bytes, __builtin_return_address(0)); }
// Nothing is to be done at these.
extern "C" void __asan_handle_no_return() {}
extern "C" void __asan_before_dynamic_init(const char *) {}
extern "C" void __asan_after_dynamic_init() {}

}  // namespace emulated::races

#endif
