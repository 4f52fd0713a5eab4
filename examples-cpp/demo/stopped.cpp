// SPDX-License-Identifier: MIT OR Apache-2.0
#include "stopped.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>

namespace demo {
namespace {

constexpr char MAGIC[8] = {'d', 'e', 'm', 'o', 's', 't', 'o', 'p'};

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what + ": " + std::strerror(errno)); }

void put(std::ofstream& file, std::uint64_t value) { file.write(reinterpret_cast<const char*>(&value), sizeof value); }

// A length, then the elements.
template <class List>
void put_all(std::ofstream& file, const List& list) {
  put(file, list.size());
  file.write(reinterpret_cast<const char*>(list.data()), static_cast<std::streamsize>(list.size() * sizeof(list[0])));
}

class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path), file_(path, std::ios::binary | std::ios::ate) {
    if (!file_) fail(path);
    left_ = static_cast<std::uint64_t>(file_.tellg());
    file_.seekg(0);
  }

  void get(void* to, std::uint64_t bytes) {
    if (bytes > left_ || !file_.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes))) {
      throw std::runtime_error(path_ + " is not whole");
    }
    left_ -= bytes;
  }
  std::uint64_t number() {
    std::uint64_t value = 0;
    get(&value, sizeof value);
    return value;
  }
  template <class List>
  void get_all(List& list) {
    const std::uint64_t n = number();
    if (n > left_ / sizeof(list[0])) throw std::runtime_error(path_ + " is not whole");
    list.resize(n);
    get(list.data(), n * sizeof(list[0]));
  }

 private:
  const std::string path_;
  std::ifstream file_;
  std::uint64_t left_ = 0;  // bytes
};

// An empty file that goes when this does.
struct Scratch {
  Scratch() {
    const char* folder = std::getenv("TMPDIR");
    path = std::string(folder == nullptr || *folder == '\0' ? "/tmp" : folder) + "/replayssm-demo-XXXXXX";
    const int file = mkstemp(path.data());
    if (file < 0) fail(path);
    close(file);
  }
  ~Scratch() { unlink(path.c_str()); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::string path;
};

}  // namespace

void write_stopped(const std::string& path, const Stopped& stopped) {
  std::ofstream file(path, std::ios::binary);
  file.write(MAGIC, sizeof MAGIC);
  for (const std::uint64_t value :
       {stopped.prompt_bytes, stopped.end, stopped.seed, static_cast<std::uint64_t>(stopped.blob.position)}) {
    put(file, value);
  }
  put_all(file, stopped.text);
  put_all(file, stopped.hidden);
  put_all(file, stopped.blob.cache);
  put_all(file, stopped.blob.bytes);
  file.close();
  if (!file) fail(path);
}

Stopped read_stopped(const std::string& path) {
  Reader file(path);
  char magic[sizeof MAGIC];
  file.get(magic, sizeof magic);
  if (std::memcmp(magic, MAGIC, sizeof MAGIC) != 0) throw std::runtime_error(path + " is not a stopped request");
  Stopped stopped;
  stopped.prompt_bytes = file.number();
  stopped.end = file.number();
  stopped.seed = file.number();
  stopped.blob.position = static_cast<std::int64_t>(file.number());
  file.get_all(stopped.text);
  file.get_all(stopped.hidden);
  file.get_all(stopped.blob.cache);
  file.get_all(stopped.blob.bytes);
  // The last byte is known and not yet run.
  if (stopped.prompt_bytes >= stopped.text.size() || stopped.text.size() >= stopped.end ||
      stopped.blob.position != static_cast<std::int64_t>(stopped.text.size() - 1)) {
    throw std::runtime_error(path + " contradicts itself");
  }
  return stopped;
}

std::string resume_in_new_process(const Stopped& stopped, const std::vector<std::string>& arguments) {
  const Scratch scratch;
  write_stopped(scratch.path, stopped);

  std::vector<std::string> words = {"demo", "--resume", scratch.path};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);

  int ends[2];
  if (pipe(ends) != 0) fail("pipe");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_addclose(&actions, ends[0]);
  posix_spawn_file_actions_addclose(&actions, ends[1]);
  pid_t child = 0;
  const int refused = posix_spawn(&child, "/proc/self/exe", &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  if (refused != 0) {
    close(ends[0]);
    errno = refused;
    fail("/proc/self/exe");
  }

  std::string said;
  char buffer[4096];
  for (;;) {
    const ssize_t n = read(ends[0], buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    said.append(buffer, static_cast<std::size_t>(n));
  }
  close(ends[0]);
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) fail("waitpid");
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? said : std::string();
}

}  // namespace demo
