/* The number of a context's threads is what its descriptor says, whatever the environment says, and the threads are gone
 * when the context is. The calling thread is one of them.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#define _DEFAULT_SOURCE
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "replayssm.h"

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
  if (replayssm_context_create(&desc, &context) != REPLAYSSM_OK) exit(3);
  if (replayssm_context_query(context, &info) != REPLAYSSM_OK) exit(4);
  int brought = running() - before;
  replayssm_context_destroy(context);
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
