// One kernel for the emulated device. KERNEL: its name. SOURCE: its source. SHARED: the section of its static shared memory, which g++ leaves
// static variables of templates out of: they are shared all the same, but neither counted nor NaN at first.
#define REPLAYSSM_EMULATED
#define STRING_OF(x) #x
#define STRING(x) STRING_OF(x)
#define JOIN_OF(x, y) x##y
#define JOIN(x, y) JOIN_OF(x, y)
#define EMULATED_SHARED __attribute__((section(STRING(SHARED))))

#pragma GCC visibility push(hidden)
#include "device.h"

// Empty where the kernel has none.
extern "C" char JOIN(__start_, SHARED)[] __attribute__((weak)), JOIN(__stop_, SHARED)[] __attribute__((weak));

#define replayssm_kernel KERNEL
// Each in a namespace of its own: they share names, not meanings.
namespace JOIN(of_, KERNEL) {
extern EMULATED_SHARED char shared_memory[] __asm__("emulated_shared_memory");
#include SOURCE

template <typename Params>
struct Call {
  static void call(const void *params) { KERNEL(*(const Params *)params); }
};

template <typename Params>
emulated::Kernel announce(void (*)(Params)) {
  return {STRING(KERNEL), Call<Params>::call, sizeof(Params), JOIN(__start_, SHARED), JOIN(__stop_, SHARED)};
}

emulated::Kernel kernel = announce(KERNEL);
}  // namespace
