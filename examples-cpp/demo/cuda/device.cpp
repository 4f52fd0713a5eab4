// SPDX-License-Identifier: MIT OR Apache-2.0
#include "device.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>

namespace demo {
namespace cuda {
namespace {

// Device code, with params.h in front: a text that the build makes of both files.
const char SOURCE[] =
#include "kernels.inc"
    ;

constexpr int MAJOR = 75, MINOR = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
constexpr unsigned NON_BLOCKING = 1;   // CU_STREAM_NON_BLOCKING
constexpr int CAPTURE_GLOBAL = 0;      // CU_STREAM_CAPTURE_MODE_GLOBAL

void* open(const char* name) { return dlopen(name, RTLD_NOW | RTLD_LOCAL); }

template <class F>
void find(void* library, const char* name, F*& out) {
  out = reinterpret_cast<F*>(dlsym(library, name));
  if (out == nullptr) throw Unavailable(std::string("the library found has no ") + name);
}

}  // namespace

// What is used of the driver's interface; handles but the stream are void pointers here.
struct Driver {
  int (*init)(unsigned);
  int (*error_name)(int, const char**);
  int (*device_count)(int*);
  int (*device_get)(int*, int);
  int (*device_name)(char*, int, int);
  int (*device_attribute)(int*, int, int);
  int (*retain)(void**, int);
  int (*release)(int);
  int (*set_current)(void*);
  int (*alloc)(unsigned long long*, std::size_t);
  int (*free)(unsigned long long);
  int (*write)(unsigned long long, const void*, std::size_t, replayssm_stream);
  int (*read)(void*, unsigned long long, std::size_t, replayssm_stream);
  int (*fill8)(unsigned long long, unsigned char, std::size_t, replayssm_stream);
  int (*fill16)(unsigned long long, unsigned short, std::size_t, replayssm_stream);
  int (*stream_create)(replayssm_stream*, unsigned);
  int (*stream_destroy)(replayssm_stream);
  int (*stream_wait)(replayssm_stream);
  int (*begin_capture)(replayssm_stream, int);
  int (*end_capture)(replayssm_stream, void**);
  int (*graph_nodes)(void*, void**, std::size_t*);
  int (*graph_destroy)(void*);
  int (*instantiate)(void**, void*, unsigned long long);
  int (*executable_destroy)(void*);
  int (*graph_upload)(void*, replayssm_stream);
  int (*graph_launch)(void*, replayssm_stream);
  int (*event_create)(void**, unsigned);
  int (*event_destroy)(void*);
  int (*event_record)(void*, replayssm_stream);
  int (*event_wait)(void*);
  int (*elapsed)(float*, void*, void*);
  int (*module_load)(void**, const void*);
  int (*module_unload)(void*);
  int (*get_function)(void**, void*, const char*);
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, replayssm_stream, void**, void**);

  Driver() {
    void* lib = open("libcuda.so.1");
    if (lib == nullptr) throw Unavailable("there is no CUDA driver");
    find(lib, "cuInit", init);
    find(lib, "cuGetErrorName", error_name);
    find(lib, "cuDeviceGetCount", device_count);
    find(lib, "cuDeviceGet", device_get);
    find(lib, "cuDeviceGetName", device_name);
    find(lib, "cuDeviceGetAttribute", device_attribute);
    find(lib, "cuDevicePrimaryCtxRetain", retain);
    find(lib, "cuDevicePrimaryCtxRelease_v2", release);
    find(lib, "cuCtxSetCurrent", set_current);
    find(lib, "cuMemAlloc_v2", alloc);
    find(lib, "cuMemFree_v2", free);
    find(lib, "cuMemcpyHtoDAsync_v2", write);
    find(lib, "cuMemcpyDtoHAsync_v2", read);
    find(lib, "cuMemsetD8Async", fill8);
    find(lib, "cuMemsetD16Async", fill16);
    find(lib, "cuStreamCreate", stream_create);
    find(lib, "cuStreamDestroy_v2", stream_destroy);
    find(lib, "cuStreamSynchronize", stream_wait);
    find(lib, "cuStreamBeginCapture_v2", begin_capture);
    find(lib, "cuStreamEndCapture", end_capture);
    find(lib, "cuGraphGetNodes", graph_nodes);
    find(lib, "cuGraphDestroy", graph_destroy);
    find(lib, "cuGraphInstantiateWithFlags", instantiate);
    find(lib, "cuGraphExecDestroy", executable_destroy);
    find(lib, "cuGraphUpload", graph_upload);
    find(lib, "cuGraphLaunch", graph_launch);
    find(lib, "cuEventCreate", event_create);
    find(lib, "cuEventDestroy_v2", event_destroy);
    find(lib, "cuEventRecord", event_record);
    find(lib, "cuEventSynchronize", event_wait);
    find(lib, "cuEventElapsedTime", elapsed);
    find(lib, "cuModuleLoadData", module_load);
    find(lib, "cuModuleUnload", module_unload);
    find(lib, "cuModuleGetFunction", get_function);
    find(lib, "cuLaunchKernel", launch);
    const int code = init(0);
    if (code != 0) throw Unavailable("the CUDA driver does not start: " + name_of(code));
    int n = 0;
    check(device_count(&n), "cuDeviceGetCount");
    if (n == 0) throw Unavailable("there is no CUDA device");
  }

  std::string name_of(int code) const {
    const char* text = nullptr;
    if (error_name(code, &text) != 0 || text == nullptr) return "CUresult " + std::to_string(code);
    return text;
  }
  void check(int code, const char* call) const {
    if (code != 0) throw std::runtime_error(std::string(call) + ": " + name_of(code));
  }
};

namespace {

const Driver& driver() {
  static const Driver instance;
  return instance;
}

unsigned long long address(const void* memory) { return reinterpret_cast<std::uintptr_t>(memory); }

// NVRTC: source in, code for one architecture out.
class Compiler {
 public:
  explicit Compiler(const std::string& path) {
    std::vector<std::string> names;
    if (!path.empty()) {
      names.push_back(path);
    } else {
      if (DEMO_NVRTC[0] != '\0') names.push_back(DEMO_NVRTC);
      for (const char* version : {"13", "12"}) {
        names.push_back(std::string("libnvrtc.so.") + version);
        names.push_back(std::string("/usr/local/cuda/lib64/libnvrtc.so.") + version);
        names.push_back(std::string("/usr/local/cuda-") + version + "/lib64/libnvrtc.so." + version);
      }
    }
    void* lib = nullptr;
    for (std::size_t i = 0; i < names.size() && lib == nullptr; ++i) lib = open(names[i].c_str());
    if (lib == nullptr) {
      throw Unavailable(path.empty() ? "there is no NVRTC to compile kernels with (--nvrtc FILE names one)"
                                     : path + " cannot be loaded");
    }
    find(lib, "nvrtcVersion", version_);
    find(lib, "nvrtcGetNumSupportedArchs", count_archs_);
    find(lib, "nvrtcGetSupportedArchs", get_archs_);
    find(lib, "nvrtcCreateProgram", create_);
    find(lib, "nvrtcCompileProgram", compile_);
    find(lib, "nvrtcDestroyProgram", destroy_);
    find(lib, "nvrtcGetProgramLogSize", log_size_);
    find(lib, "nvrtcGetProgramLog", log_);
    find(lib, "nvrtcGetCUBINSize", cubin_size_);
    find(lib, "nvrtcGetCUBIN", cubin_);
    find(lib, "nvrtcGetPTXSize", ptx_size_);
    find(lib, "nvrtcGetPTX", ptx_);
  }

  // Machine code for the architecture, or, where this compiler does not know it, PTX for the newest one before it.
  std::string compile(const char* source, int arch, std::string& built) const {
    int n = 0;
    check(count_archs_(&n));
    std::vector<int> archs(static_cast<std::size_t>(n));
    check(get_archs_(archs.data()));
    int best = 0;
    for (const int known : archs) {
      if (known <= arch && known > best) best = known;
    }
    if (best == 0) throw Unavailable("NVRTC has no code for sm_" + std::to_string(arch));
    const std::string target = (best == arch ? "sm_" : "compute_") + std::to_string(best);
    int major = 0, minor = 0;
    check(version_(&major, &minor));
    built = target + ", NVRTC " + std::to_string(major) + "." + std::to_string(minor);

    void* program = nullptr;
    check(create_(&program, source, "kernels.cu", 0, nullptr, nullptr));
    const std::string option = "--gpu-architecture=" + target;
    const char* const options[] = {option.c_str(), "-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true",
                                   "--prec-sqrt=true"};
    const int code = compile_(program, sizeof options / sizeof options[0], options);
    const std::string log = text(program, log_size_, log_);
    if (code != 0 || !only_info(log)) throw std::runtime_error("NVRTC on kernels.cu:\n" + log);
    const std::string out = best == arch ? text(program, cubin_size_, cubin_) : text(program, ptx_size_, ptx_);
    destroy_(&program);
    return out;
  }

 private:
  static void check(int code) {
    if (code != 0) throw std::runtime_error("NVRTC: error " + std::to_string(code));
  }
  static std::string text(void* program, int (*size)(void*, std::size_t*), int (*get)(void*, char*)) {
    std::size_t n = 0;
    check(size(program, &n));
    std::string out(n, '\0');
    check(get(program, out.data()));
    return out;
  }
  // Whether every line is blank or says what ptxas did.
  static bool only_info(const std::string& log) {
    for (std::size_t at = 0; at < log.size();) {
      const std::size_t end = std::min(log.find('\n', at), log.size());
      const std::string line(log.c_str() + at, std::strlen(log.substr(at, end - at).c_str()));
      if (line.find_first_not_of(" \r\t") != std::string::npos && line.compare(0, 10, "ptxas info") != 0) return false;
      at = end + 1;
    }
    return true;
  }

  int (*version_)(int*, int*);
  int (*count_archs_)(int*);
  int (*get_archs_)(int*);
  int (*create_)(void**, const char*, const char*, int, const char* const*, const char* const*);
  int (*compile_)(void*, int, const char* const*);
  int (*destroy_)(void**);
  int (*log_size_)(void*, std::size_t*);
  int (*log_)(void*, char*);
  int (*cubin_size_)(void*, std::size_t*);
  int (*cubin_)(void*, char*);
  int (*ptx_size_)(void*, std::size_t*);
  int (*ptx_)(void*, char*);
};

}  // namespace

Device::Device(const std::string& nvrtc) : driver_(driver()) {
  const Compiler compiler(nvrtc);
  driver_.check(driver_.device_get(&device_, 0), "cuDeviceGet");
  char name[128] = {};
  driver_.check(driver_.device_name(name, sizeof name - 1, device_), "cuDeviceGetName");
  name_ = name;
  int major = 0, minor = 0;
  driver_.check(driver_.device_attribute(&major, MAJOR, device_), "cuDeviceGetAttribute");
  driver_.check(driver_.device_attribute(&minor, MINOR, device_), "cuDeviceGetAttribute");
  const std::string code = compiler.compile(SOURCE, 10 * major + minor, built_);
  void* context = nullptr;
  driver_.check(driver_.retain(&context, device_), "cuDevicePrimaryCtxRetain");
  try {
    driver_.check(driver_.set_current(context), "cuCtxSetCurrent");
    driver_.check(driver_.stream_create(&stream_, NON_BLOCKING), "cuStreamCreate");
    driver_.check(driver_.module_load(&module_, code.data()), "cuModuleLoadData");
    for (const char* kernel : {"embed", "linear", "rms_norm", "gate", "append_keys", "attend", "draft_input", "sample", "verify",
                               "last_tokens"}) {
      void* function = nullptr;
      driver_.check(driver_.get_function(&function, module_, kernel), kernel);
      kernels_.emplace_back(kernel, function);
    }
  } catch (...) {
    close();
    throw;
  }
}

Device::~Device() { close(); }

void Device::close() noexcept {
  if (module_ != nullptr) driver_.module_unload(module_);
  if (stream_ != nullptr) driver_.stream_destroy(stream_);
  driver_.set_current(nullptr);
  driver_.release(device_);
}

void Device::wait() const { driver_.check(driver_.stream_wait(stream_), "cuStreamSynchronize"); }

void Device::launch(const char* kernel, std::pair<unsigned, unsigned> grid, unsigned threads, std::size_t shared_bytes,
                    void* args) const {
  if (grid.first == 0 || grid.second == 0) return;
  for (const auto& [name, function] : kernels_) {
    if (name != kernel) continue;
    void* params[] = {args};
    driver_.check(driver_.launch(function, grid.first, grid.second, 1, threads, 1, 1, static_cast<unsigned>(shared_bytes),
                                 stream_, params, nullptr),
                  kernel);
    return;
  }
  throw std::logic_error(std::string("no kernel ") + kernel);
}

void* Device::allocate(std::size_t bytes) const {
  unsigned long long memory = 0;
  driver_.check(driver_.alloc(&memory, bytes), "cuMemAlloc");
  driver_.check(driver_.fill8(memory, 0, bytes, stream_), "cuMemsetD8Async");
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(memory));
}

void Device::free(void* memory) const noexcept { driver_.free(address(memory)); }

void Device::write(void* to, const void* from, std::size_t bytes) const {
  driver_.check(driver_.write(address(to), from, bytes, stream_), "cuMemcpyHtoDAsync");
}

void Device::read(void* to, const void* from, std::size_t bytes) const {
  driver_.check(driver_.read(to, address(from), bytes, stream_), "cuMemcpyDtoHAsync");
  wait();
}

void Device::fill16(void* to, std::uint16_t value, std::size_t n) const {
  driver_.check(driver_.fill16(address(to), value, n, stream_), "cuMemsetD16Async");
}

Graph::Graph(const Device& device, const std::function<void()>& work) : device_(device) {
  const Driver& d = device.driver_;
  void* graph = nullptr;
  d.check(d.begin_capture(device.stream_, CAPTURE_GLOBAL), "cuStreamBeginCapture");
  try {
    work();
  } catch (...) {
    if (d.end_capture(device.stream_, &graph) == 0 && graph != nullptr) d.graph_destroy(graph);
    throw;
  }
  d.check(d.end_capture(device.stream_, &graph), "cuStreamEndCapture");
  const int counted = d.graph_nodes(graph, nullptr, &nodes_);
  const int made = d.instantiate(&executable_, graph, 0);
  d.graph_destroy(graph);
  d.check(counted, "cuGraphGetNodes");
  d.check(made, "cuGraphInstantiateWithFlags");
  d.check(d.graph_upload(executable_, device.stream_), "cuGraphUpload");
}

Graph::~Graph() {
  if (executable_ != nullptr) device_.driver_.executable_destroy(executable_);
}

void Graph::launch() const {
  device_.driver_.check(device_.driver_.graph_launch(executable_, device_.stream_), "cuGraphLaunch");
}

Stopwatch::Stopwatch(const Device& device) : device_(device) {
  for (void*& event : events_) device.driver_.check(device.driver_.event_create(&event, 0), "cuEventCreate");
}

Stopwatch::~Stopwatch() {
  for (void* event : events_) {
    if (event != nullptr) device_.driver_.event_destroy(event);
  }
}

void Stopwatch::start() const {
  device_.driver_.check(device_.driver_.event_record(events_[0], device_.stream_), "cuEventRecord");
}

double Stopwatch::stop() const {
  const Driver& d = device_.driver_;
  d.check(d.event_record(events_[1], device_.stream_), "cuEventRecord");
  d.check(d.event_wait(events_[1]), "cuEventSynchronize");
  float milliseconds = 0;
  d.check(d.elapsed(&milliseconds, events_[0], events_[1]), "cuEventElapsedTime");
  return static_cast<double>(milliseconds) / 1000;
}

}  // namespace cuda
}  // namespace demo
