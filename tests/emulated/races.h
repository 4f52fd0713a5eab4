// Accesses to shared memory with nothing in between that orders them: found while a kernel runs on the emulated device, if both are built with
// REPLAYSSM_RACES. Then kernels call __asan_load* and __asan_store* at every access (gcc's -fsanitize=kernel-address, of which only the calls are used).
//
// Each warp has a vector clock, and so have the copies that a warp has under way, which are done when somebody has waited for them. The block's
// barrier makes all clocks equal; barriers and counters in shared memory hand on those of who arrives, phase by phase. An access races with an
// earlier one of another warp, of which one writes, if its warp's clock has not heard of that. Lanes of a warp are told apart between two points at
// which all of them meet.
#pragma once

namespace emulated::races {

#ifdef REPLAYSSM_RACES

// A block begins. fixed: static shared memory.
void begin(unsigned warps, const char *dynamic, unsigned dynamic_bytes, const char *fixed, unsigned fixed_bytes);
// All warps have met, or all lanes of one.
void block_meets();
void warp_meets(unsigned warp);
// The running thread arrives at a barrier or sets a counter, itself or its copies up to now or both; a phase of a barrier has ended; the thread has seen
// that a phase of this parity has, or a counter.
void arrive(const void *at, bool itself, bool its_copies);
void end_phase(const void *at, unsigned parity);
void see_phase(const void *at, unsigned parity);
void see_counter(const void *at);
// The running thread begins a copy, and has waited for all of its.
void copy(void *to, const void *from, unsigned bytes);
void copies_are_done();
// Whether what the running thread reads counts: what does not, is not looked at.
void reads_count(bool do_count);
bool reads_count();
// Whether any were found since the last call.
bool found();

#else

inline void begin(unsigned, const char *, unsigned, const char *, unsigned) {}
inline void block_meets() {}
inline void warp_meets(unsigned) {}
inline void arrive(const void *, bool, bool) {}
inline void end_phase(const void *, unsigned) {}
inline void see_phase(const void *, unsigned) {}
inline void see_counter(const void *) {}
inline void copy(void *to, const void *from, unsigned bytes) { __builtin_memcpy(to, from, bytes); }
inline void copies_are_done() {}
inline void reads_count(bool) {}
inline bool reads_count() { return true; }
inline bool found() { return false; }

#endif

}  // namespace emulated::races
