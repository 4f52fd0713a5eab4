/* The number of a context's threads is what its descriptor says, whatever the environment says, and the threads are gone
 * when the context is. The calling thread is one of them. No file is opened, but those that say how many processors the process
 * may use, where its number of threads is left open; no environment variable is read.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#define _DEFAULT_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "replayssm.h"

static int inside; /* a call of the library */
static int may_count_processors;

static void must_not(const char *what, const char *name) {
  static const char *const counting[3] = {"/proc/self/cgroup", "/proc/self/mountinfo", "/sys/fs/cgroup/"};
  if (!inside) return;
  for (int i = 0; i < 3; i++) {
    if (may_count_processors && strncmp(name, counting[i], strlen(counting[i])) == 0) return;
  }
  fprintf(stderr, "threads: %s %s\n", what, name);
  exit(7);
}

/* What the library calls, instead of the C library's. */
static int opened(const char *path, int flags, va_list rest) {
  const int mode = flags & O_CREAT ? va_arg(rest, int) : 0;
  must_not("opens", path);
  return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}
#define OPEN(name)                            \
  int name(const char *path, int flags, ...) { \
    va_list rest;                              \
    va_start(rest, flags);                     \
    const int file = opened(path, flags, rest); \
    va_end(rest);                              \
    return file;                               \
  }
OPEN(open)
OPEN(open64)
char *getenv(const char *name) {
  must_not("reads the environment's", name);
  return NULL;
}

/* Threads of this process. */
static int running(void) {
  DIR *folder = opendir("/proc/self/task");
  int n = 0;
  if (folder == NULL) exit(2);
  for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) n += entry->d_name[0] != '.';
  closedir(folder);
  return n;
}

/* What a context says, how many threads it brought, and how many it left behind. */
static void report(int32_t n_threads) {
  replayssm_context_desc desc = REPLAYSSM_INIT(replayssm_context_desc);
  replayssm_context_info info = REPLAYSSM_INIT(replayssm_context_info);
  replayssm_context *context = NULL;
  int before = running();
  desc.n_threads = n_threads;
  inside = 1, may_count_processors = n_threads == 0;
  if (replayssm_context_create(&desc, &context) != REPLAYSSM_OK) exit(3);
  if (replayssm_context_query(context, &info) != REPLAYSSM_OK) exit(4);
  inside = 0;
  int brought = running() - before;
  inside = 1;
  replayssm_context_destroy(context);
  inside = 0;
  /* The kernel may list a thread for a moment after it has been waited for. */
  for (int i = 0; i < 1000 && running() != before; i++) usleep(1000);
  int left = running() - before;
  printf("threads: asked %d, says %d, brought %d, left %d\n", n_threads, info.n_threads, brought, left);
  if (n_threads > 0 && (info.n_threads != n_threads || brought != n_threads - 1)) exit(5);
  if (info.n_threads < 1 || left != 0) exit(6);
}

int main(void) {
  report(1);
  report(2);
  report(3);
  report(0);
  return 0;
}
