// libcuda.so.1 without a GPU: the functions that the library, its tests and replayssm-bench call, on a device whose memory is the process's and whose kernels
// are compiled for its processor (machine.h). Streams are empty at once: what is enqueued has been done when the call returns.
//
// A kernel is known by its compiled image: build.sh makes kernels.inc from the images that the library embeds. Other code is refused.
// Beyond what a driver does, blocks of memory have guards, which every launch and every free checks; and tests may have a call fail, or
// the context (emulated_fail).

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "machine.h"

namespace {

enum Result : int {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  NO_BINARY_FOR_GPU = 209,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  ILLEGAL_ADDRESS = 700,
  LAUNCH_FAILED = 719,
};

struct Name {
  Result result;
  const char *name, *text;
} const NAMES[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
};

// Of cuda.h, as far as they are used.
enum {
  DEVICE_MULTIPROCESSORS = 16,
  DEVICE_MAJOR = 75,
  DEVICE_MINOR = 76,
  DEVICE_SHARED_OPTIN = 97,
  FUNCTION_SHARED = 1,
  FUNCTION_MOST_DYNAMIC = 8,
  POINTER_MEMORY_TYPE = 2,
  TYPE_HOST = 1,
  TYPE_DEVICE = 2,
  TYPE_UNIFIED = 4,
  MOST_PITCH = 0x7FFFFFFF,
};

struct Config {
  unsigned blocks[3], threads[3], shared_bytes;
  void *stream, *attributes;
  unsigned n_attributes;
};

// CUDA_MEMCPY2D.
struct Side {
  size_t x, y;
  int type;
  void *host;
  uintptr_t device;
  void *array;
  size_t pitch;
};

struct Copy2D {
  Side from, to;
  size_t bytes, rows;
};

struct Image {
  const char *name;
  unsigned long long bytes, hash;
};
#define KERNEL(name, arch, bytes, hash) {name, bytes, hash},
const Image IMAGES[] = {
#include "kernels.inc"
};
#undef KERNEL
#define KERNEL(name, arch, bytes, hash) arch,
const int ARCHS[] = {
#include "kernels.inc"
};
#undef KERNEL

struct Loaded {
  const emulated::Kernel *kernel;
  unsigned most_dynamic;
};

struct Block {
  size_t bytes;
  bool device;
};

// A launch with its own copy of the parameters, which are constant memory.
struct Launch {
  const emulated::Kernel *kernel;
  unsigned blocks, threads, shared_bytes;
  std::vector<unsigned long long> params;
};

// What was captured: launches, one after the other. Graphs and what is instantiated of them are the same.
typedef std::vector<Launch> Graph;

// Everything, and the one launch that runs.
std::mutex mutex;
typedef std::lock_guard<std::mutex> Lock;
// Never destroyed: threads may still run when the process ends.
std::map<uintptr_t, Block> &blocks = *new std::map<uintptr_t, Block>;
std::vector<Loaded *> &libraries = *new std::vector<Loaded *>;
std::vector<void *> &streams = *new std::vector<void *>;
std::map<uintptr_t, size_t> &registered = *new std::map<uintptr_t, size_t>;
// Of streams that capture. Copies and fills are not captured: they are done at once.
std::map<void *, Graph> &captures = *new std::map<void *, Graph>;
// The primary context of the only device.
int context;
long retained;
thread_local std::vector<void *> stack;

void *current() { return stack.empty() ? nullptr : stack.back(); }

bool is_stream(void *stream) {
  if ((uintptr_t)stream <= 2) return true;
  for (void *s : streams)
    if (s == stream) return true;
  return false;
}

// What a test has asked for: calls until one fails, and with what; whether all others fail from then on.
long calls_until_failure = -1;
int failure;
bool is_for_good, has_failed;

// Every function that may fail but those that free: whether it is to. A context that has failed for good can still be made current.
int asked_to_fail(bool works_in_context = true) {
  if (is_for_good && has_failed) return works_in_context ? failure : (int)SUCCESS;
  if (calls_until_failure < 0 || calls_until_failure-- > 0) return SUCCESS;
  has_failed = true;
  return failure;
}

// ---- Memory ----

enum : size_t { GUARD = 256 };
enum : unsigned char { GUARDED = 0xFF };

Result allocate(uintptr_t *at, size_t bytes, bool device) {
  if (bytes == 0) return INVALID_VALUE;
  if (bytes > (size_t)1 << 40) return OUT_OF_MEMORY;
  size_t whole = (bytes + 2 * GUARD + GUARD - 1) / GUARD * GUARD;
  char *block = (char *)aligned_alloc(GUARD, whole);
  if (!block) return OUT_OF_MEMORY;
  // What is not written is NaN.
  memset(block, GUARDED, bytes <= 64 << 20 ? whole : GUARD);
  memset(block + GUARD + bytes, GUARDED, GUARD);
  *at = (uintptr_t)block + GUARD;
  blocks[*at] = Block{bytes, device};
  return SUCCESS;
}

bool guards_hold(uintptr_t at, const Block &block, const char *after) {
  for (size_t i = 0; i < GUARD; i++)
    for (const unsigned char *guard : {(unsigned char *)at - 1 - i, (unsigned char *)at + block.bytes + i}) {
      if (*guard == GUARDED) continue;
      const char *where = guard < (unsigned char *)at ? "in front of" : "behind";
      fprintf(stderr, "emulated device: %s: bytes %s a block of %zu were written\n", after, where, block.bytes);
      // Said once.
      memset((char *)at - GUARD, GUARDED, GUARD);
      memset((char *)at + block.bytes, GUARDED, GUARD);
      return false;
    }
  return true;
}

// Copies and fills must lie within a block of the device, or within memory that was registered.
bool is_within(uintptr_t at, size_t bytes) {
  for (const auto &part : registered)
    if (at >= part.first && at + bytes <= part.first + part.second) return true;
  auto next = blocks.upper_bound(at);
  if (next == blocks.begin()) return false;
  auto block = std::prev(next);
  return at + bytes <= block->first + block->second.bytes;
}

Result release(uintptr_t at, bool device) {
  auto block = blocks.find(at);
  if (block == blocks.end() || block->second.device != device) return INVALID_VALUE;
  bool fine = guards_hold(at, block->second, "free");
  blocks.erase(block);
  free((char *)at - GUARD);
  // Nobody looks at what a free returns.
  if (!fine) abort();
  return SUCCESS;
}

Result move(uintptr_t device, void *host, size_t bytes, bool to_host) {
  Lock lock(mutex);
  if (!current()) return INVALID_CONTEXT;
  if (int why = asked_to_fail()) return (Result)why;
  if (!is_within(device, bytes)) return INVALID_VALUE;
  if (to_host) {
    memcpy(host, (void *)device, bytes);
  } else {
    memcpy((void *)device, host, bytes);
  }
  return SUCCESS;
}

Result fill(uintptr_t at, unsigned char value, size_t bytes) {
  Lock lock(mutex);
  if (!current()) return INVALID_CONTEXT;
  if (int why = asked_to_fail()) return (Result)why;
  if (!is_within(at, bytes)) return INVALID_VALUE;
  memset((void *)at, value, bytes);
  return SUCCESS;
}

// ---- Code ----

// How long an ELF file is: the end of its last part.
unsigned long long bytes_of(const unsigned char *elf) {
  auto read = [&](unsigned long long at, int bytes) {
    unsigned long long value = 0;
    memcpy(&value, elf + at, bytes);
    return value;
  };
  if (memcmp(elf, "\x7F" "ELF\x02", 5) != 0) return 0;
  unsigned long long segments = read(32, 8), sections = read(40, 8), end = 64;
  auto reach = [&](unsigned long long to) { end = to > end ? to : end; };
  unsigned segment = read(54, 2), n_segments = read(56, 2), section = read(58, 2), n_sections = read(60, 2);
  reach(segments + segment * n_segments);
  reach(sections + section * n_sections);
  for (unsigned i = 0; i < n_sections; i++) {
    unsigned long long at = sections + i * section;
    // Sections without bytes in the file: SHT_NOBITS.
    if (read(at + 4, 4) != 8) reach(read(at + 24, 8) + read(at + 32, 8));
  }
  return end;
}

const emulated::Kernel *kernel_of(const unsigned char *image) {
  unsigned long long bytes = bytes_of(image), hash = 0xCBF29CE484222325ull;
  for (unsigned long long i = 0; i < bytes; i++) hash = (hash ^ image[i]) * 0x100000001B3ull;
  for (const Image &known : IMAGES)
    if (known.bytes == bytes && known.hash == hash) return emulated::find(known.name);
  return nullptr;
}

Result run(const Launch &launch) {
  std::vector<unsigned long long> params = launch.params;
  if (!emulated::run(*launch.kernel, launch.blocks, launch.threads, launch.shared_bytes, params.data())) return LAUNCH_FAILED;
  if (params != launch.params) return ILLEGAL_ADDRESS;
  bool fine = true;
  for (const auto &block : blocks) fine = guards_hold(block.first, block.second, launch.kernel->name) && fine;
  return fine ? SUCCESS : ILLEGAL_ADDRESS;
}

bool is_loaded(void *handle) {
  for (Loaded *loaded : libraries)
    if (loaded == handle) return true;
  return false;
}

}  // namespace

// The call with this many others in front of it fails, and with for_good all behind it too; -1: none. Whether one has failed since the last time.
extern "C" __attribute__((visibility("default"))) int emulated_fail(long after, int with, int for_good) {
  std::lock_guard<std::mutex> lock(mutex);
  bool before = has_failed;
  calls_until_failure = after, failure = with, is_for_good = for_good, has_failed = false;
  return before;
}

// Blocks of memory, code and streams that there are, and how often the context is retained.
extern "C" __attribute__((visibility("default"))) long emulated_live() {
  std::lock_guard<std::mutex> lock(mutex);
  return (long)(blocks.size() + libraries.size() + streams.size()) + retained;
}

#define EXPORT extern "C" __attribute__((visibility("default"))) int
// Refuses what is called without a current context.
#define IN_CONTEXT \
  Lock lock(mutex); \
  if (!current()) return INVALID_CONTEXT
#define MAY_FAIL \
  if (int why = asked_to_fail()) return why
// Of what asks about devices and contexts.
#define MAY_FAIL_BEFORE \
  Lock lock(mutex);     \
  if (int why = asked_to_fail(false)) return why

EXPORT cuInit(unsigned) { return SUCCESS; }

EXPORT cuDriverGetVersion(int *version) {
  *version = 12080;
  return SUCCESS;
}

EXPORT cuGetErrorName(int result, const char **name) {
  for (const Name &n : NAMES)
    if (n.result == result) return *name = n.name, SUCCESS;
  return *name = nullptr, INVALID_VALUE;
}

EXPORT cuGetErrorString(int result, const char **text) {
  for (const Name &n : NAMES)
    if (n.result == result) return *text = n.text, SUCCESS;
  return *text = nullptr, INVALID_VALUE;
}

// ---- The device and its context ----

EXPORT cuDeviceGetCount(int *count) {
  MAY_FAIL_BEFORE;
  *count = 1;
  return SUCCESS;
}

EXPORT cuDeviceGet(int *device, int ordinal) {
  MAY_FAIL_BEFORE;
  if (ordinal != 0) return INVALID_DEVICE;
  *device = 0;
  return SUCCESS;
}

EXPORT cuDeviceGetName(char *name, int bytes, int device) {
  MAY_FAIL_BEFORE;
  if (device != 0) return INVALID_DEVICE;
  snprintf(name, bytes, "emulated device");
  return SUCCESS;
}

EXPORT cuDeviceGetAttribute(int *value, int attribute, int device) {
  MAY_FAIL_BEFORE;
  if (device != 0) return INVALID_DEVICE;
  int arch = ARCHS[0];
  switch (attribute) {
    case DEVICE_MULTIPROCESSORS: *value = 6; return SUCCESS;
    case DEVICE_MAJOR: *value = arch / 10; return SUCCESS;
    case DEVICE_MINOR: *value = arch % 10; return SUCCESS;
    case DEVICE_SHARED_OPTIN: *value = (arch == 80 ? 163 : arch == 120 ? 99 : 227) * 1024; return SUCCESS;
    default: return INVALID_VALUE;
  }
}

EXPORT cuDevicePrimaryCtxRetain(void **to, int device) {
  Lock lock(mutex);
  if (device != 0) return INVALID_DEVICE;
  MAY_FAIL;
  retained++;
  *to = &context;
  return SUCCESS;
}

EXPORT cuDevicePrimaryCtxRelease_v2(int device) {
  Lock lock(mutex);
  if (device != 0) return INVALID_DEVICE;
  retained--;
  return SUCCESS;
}

EXPORT cuCtxGetCurrent(void **to) {
  *to = current();
  return SUCCESS;
}

EXPORT cuCtxSetCurrent(void *to) {
  if (!stack.empty()) stack.pop_back();
  if (to) stack.push_back(to);
  return SUCCESS;
}

EXPORT cuCtxGetDevice(int *device) {
  MAY_FAIL_BEFORE;
  if (!current()) return INVALID_CONTEXT;
  *device = 0;
  return SUCCESS;
}

EXPORT cuCtxPushCurrent_v2(void *to) {
  MAY_FAIL_BEFORE;
  if (to != &context) return INVALID_CONTEXT;
  stack.push_back(to);
  return SUCCESS;
}

EXPORT cuCtxPopCurrent_v2(void **to) {
  if (!current()) return INVALID_CONTEXT;
  *to = current();
  stack.pop_back();
  return SUCCESS;
}

EXPORT cuCtxSynchronize() {
  IN_CONTEXT;
  MAY_FAIL;
  return SUCCESS;
}

// ---- Memory ----

EXPORT cuMemAlloc_v2(uintptr_t *at, size_t bytes) {
  IN_CONTEXT;
  MAY_FAIL;
  return allocate(at, bytes, true);
}

// All of this device's memory is the host's too.
EXPORT cuMemAllocManaged(uintptr_t *at, size_t bytes, unsigned) {
  IN_CONTEXT;
  return allocate(at, bytes, true);
}

EXPORT cuMemFree_v2(uintptr_t at) {
  IN_CONTEXT;
  return release(at, true);
}

EXPORT cuMemHostAlloc(uintptr_t *at, size_t bytes, unsigned) {
  IN_CONTEXT;
  MAY_FAIL;
  return allocate(at, bytes, false);
}

EXPORT cuMemFreeHost(uintptr_t at) {
  IN_CONTEXT;
  return release(at, false);
}

// All of the process's memory is visible to this device.
EXPORT cuMemHostRegister_v2(void *at, size_t bytes, unsigned) {
  IN_CONTEXT;
  registered[(uintptr_t)at] = bytes;
  return SUCCESS;
}

EXPORT cuMemHostGetDevicePointer_v2(uintptr_t *to, void *from, unsigned) {
  *to = (uintptr_t)from;
  return SUCCESS;
}

EXPORT cuPointerGetAttribute(void *to, int attribute, uintptr_t at) {
  IN_CONTEXT;
  if (attribute != POINTER_MEMORY_TYPE || !is_within(at, 1)) return INVALID_VALUE;
  auto block = blocks.upper_bound(at);
  bool device = block != blocks.begin() && at < (--block)->first + block->second.bytes && block->second.device;
  *(unsigned *)to = device ? TYPE_DEVICE : TYPE_HOST;
  return SUCCESS;
}

EXPORT cuMemsetD8_v2(uintptr_t at, unsigned char value, size_t bytes) { return fill(at, value, bytes); }

EXPORT cuMemsetD8Async(uintptr_t at, unsigned char value, size_t bytes, void *) { return fill(at, value, bytes); }

EXPORT cuMemcpyDtoH_v2(void *to, uintptr_t from, size_t bytes) { return move(from, to, bytes, true); }

EXPORT cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t bytes, void *) { return move(from, to, bytes, true); }

EXPORT cuMemcpyHtoD_v2(uintptr_t to, void *from, size_t bytes) { return move(to, from, bytes, false); }

EXPORT cuMemcpyHtoDAsync_v2(uintptr_t to, void *from, size_t bytes, void *) { return move(to, from, bytes, false); }

EXPORT cuMemcpy2DAsync_v2(const Copy2D *copy, void *) {
  const Side &from = copy->from, &to = copy->to;
  bool to_host = to.type == TYPE_HOST;
  const Side &host = to_host ? to : from, &device = to_host ? from : to;
  if (host.type != TYPE_HOST || device.type != TYPE_UNIFIED || from.x || from.y || to.x || to.y) return INVALID_VALUE;
  for (size_t pitch : {host.pitch, device.pitch})
    if (pitch < copy->bytes || pitch > MOST_PITCH) return INVALID_VALUE;
  for (size_t row = 0; row < copy->rows; row++) {
    int result = move(device.device + row * device.pitch, (char *)host.host + row * host.pitch, copy->bytes, to_host);
    if (result != SUCCESS) return result;
  }
  return SUCCESS;
}

// ---- Streams ----

EXPORT cuStreamCreate(void **stream, unsigned) {
  IN_CONTEXT;
  MAY_FAIL;
  *stream = malloc(1);
  streams.push_back(*stream);
  return SUCCESS;
}

EXPORT cuStreamDestroy_v2(void *stream) {
  IN_CONTEXT;
  for (size_t i = 0; i < streams.size(); i++)
    if (streams[i] == stream) {
      streams.erase(streams.begin() + i);
      free(stream);
      return SUCCESS;
    }
  return INVALID_HANDLE;
}

EXPORT cuStreamGetCtx(void *stream, void **to) {
  IN_CONTEXT;
  MAY_FAIL;
  if (!is_stream(stream)) return INVALID_HANDLE;
  *to = &context;
  return SUCCESS;
}

EXPORT cuStreamSynchronize(void *stream) {
  IN_CONTEXT;
  MAY_FAIL;
  return is_stream(stream) ? SUCCESS : INVALID_HANDLE;
}

EXPORT cuStreamIsCapturing(void *stream, int *status) {
  IN_CONTEXT;
  MAY_FAIL;
  *status = captures.count(stream) != 0;
  return is_stream(stream) ? SUCCESS : INVALID_HANDLE;
}

EXPORT cuThreadExchangeStreamCaptureMode(int *mode) {
  static thread_local int own;
  int old = own;
  own = *mode;
  *mode = old;
  return SUCCESS;
}

// ---- Kernels: a library, its kernel and the function are one handle ----

EXPORT cuLibraryLoadData(void **library, const void *code, void *, void *, unsigned, void *, void *, unsigned) {
  IN_CONTEXT;
  MAY_FAIL;
  const emulated::Kernel *kernel = kernel_of((const unsigned char *)code);
  if (!kernel) return NO_BINARY_FOR_GPU;
  Loaded *loaded = new Loaded{kernel, 48 * 1024};
  libraries.push_back(loaded);
  *library = loaded;
  return SUCCESS;
}

EXPORT cuLibraryUnload(void *library) {
  IN_CONTEXT;
  for (size_t i = 0; i < libraries.size(); i++)
    if (libraries[i] == library) {
      delete libraries[i];
      libraries.erase(libraries.begin() + i);
      return SUCCESS;
    }
  return INVALID_HANDLE;
}

EXPORT cuLibraryGetKernel(void **kernel, void *library, const char *name) {
  IN_CONTEXT;
  MAY_FAIL;
  if (!is_loaded(library)) return INVALID_HANDLE;
  if (strcmp(name, "replayssm_kernel") != 0) return NOT_FOUND;
  *kernel = library;
  return SUCCESS;
}

EXPORT cuKernelGetFunction(void **function, void *kernel) {
  IN_CONTEXT;
  MAY_FAIL;
  if (!is_loaded(kernel)) return INVALID_HANDLE;
  *function = kernel;
  return SUCCESS;
}

EXPORT cuKernelGetAttribute(int *value, int attribute, void *kernel, int) {
  IN_CONTEXT;
  MAY_FAIL;
  if (!is_loaded(kernel)) return INVALID_HANDLE;
  if (attribute != FUNCTION_SHARED) return INVALID_VALUE;
  const emulated::Kernel *k = ((Loaded *)kernel)->kernel;
  *value = (int)(k->shared_end - k->shared);
  return SUCCESS;
}

EXPORT cuKernelSetAttribute(int attribute, int value, void *kernel, int) {
  IN_CONTEXT;
  MAY_FAIL;
  if (!is_loaded(kernel)) return INVALID_HANDLE;
  if (attribute != FUNCTION_MOST_DYNAMIC || value < 0 || value > (int)emulated::MOST_SHARED) return INVALID_VALUE;
  ((Loaded *)kernel)->most_dynamic = (unsigned)value;
  return SUCCESS;
}

EXPORT cuLaunchKernelEx(const Config *config, void *function, void **arguments, void **) {
  IN_CONTEXT;
  MAY_FAIL;
  if (!is_loaded(function) || !is_stream(config->stream)) return INVALID_HANDLE;
  const Loaded &loaded = *(Loaded *)function;
  bool flat = config->blocks[1] == 1 && config->blocks[2] == 1 && config->threads[1] == 1 && config->threads[2] == 1;
  unsigned n = config->threads[0];
  if (!flat || config->blocks[0] == 0 || n == 0 || n > emulated::MOST_THREADS || config->shared_bytes > loaded.most_dynamic)
    return INVALID_VALUE;
  Launch launch{loaded.kernel, config->blocks[0], n, config->shared_bytes, {}};
  launch.params.resize((loaded.kernel->params_bytes + 7) / 8);
  memcpy(launch.params.data(), arguments[0], loaded.kernel->params_bytes);
  auto capture = captures.find(config->stream);
  if (capture == captures.end()) return run(launch);
  capture->second.push_back(launch);
  return SUCCESS;
}

// ---- Graphs, and events: the processor's clock ----

EXPORT cuStreamBeginCapture_v2(void *stream, int) {
  IN_CONTEXT;
  MAY_FAIL;
  if (!is_stream(stream) || captures.count(stream)) return INVALID_HANDLE;
  captures[stream];
  return SUCCESS;
}

EXPORT cuStreamEndCapture(void *stream, Graph **graph) {
  IN_CONTEXT;
  auto capture = captures.find(stream);
  if (capture == captures.end()) return INVALID_HANDLE;
  *graph = new Graph(capture->second);
  captures.erase(capture);
  return SUCCESS;
}

EXPORT cuGraphInstantiateWithFlags(Graph **exec, const Graph *graph, unsigned long long) {
  *exec = new Graph(*graph);
  return SUCCESS;
}

EXPORT cuGraphDestroy(Graph *graph) {
  delete graph;
  return SUCCESS;
}

EXPORT cuGraphExecDestroy(Graph *graph) {
  delete graph;
  return SUCCESS;
}

EXPORT cuGraphLaunch(const Graph *graph, void *stream) {
  IN_CONTEXT;
  MAY_FAIL;
  if (!is_stream(stream)) return INVALID_HANDLE;
  for (const Launch &launch : *graph)
    if (Result result = run(launch)) return result;
  return SUCCESS;
}

typedef std::chrono::steady_clock Clock;

EXPORT cuEventCreate(Clock::time_point **event, unsigned) {
  *event = new Clock::time_point;
  return SUCCESS;
}

EXPORT cuEventDestroy_v2(Clock::time_point *event) {
  delete event;
  return SUCCESS;
}

EXPORT cuEventRecord(Clock::time_point *event, void *) {
  *event = Clock::now();
  return SUCCESS;
}

EXPORT cuEventSynchronize(Clock::time_point *) { return SUCCESS; }

EXPORT cuEventElapsedTime(float *ms, const Clock::time_point *begin, const Clock::time_point *end) {
  *ms = std::chrono::duration<float, std::milli>(*end - *begin).count();
  return SUCCESS;
}
