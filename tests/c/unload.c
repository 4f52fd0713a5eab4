/* A host that loads the library at run time may unload it when every handle is gone: no thread of it runs on, and loading
 * it again works. The path of the library is the argument.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "replayssm.h"

static const char *path;

static void *symbol(void *library, const char *name) {
  void *found = dlsym(library, name);
  if (found == NULL) {
    fprintf(stderr, "unload: %s\n", dlerror());
    exit(1);
  }
  return found;
}

/* A plugin's life, on a thread of its own. */
static void *plugin(void *unused) {
  replayssm_context_desc desc = REPLAYSSM_INIT(replayssm_context_desc);
  replayssm_context *context = NULL;
  replayssm_status (*create)(const replayssm_context_desc *, replayssm_context **);
  void (*destroy)(replayssm_context *);
  const char *(*message)(void);
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    fprintf(stderr, "unload: %s\n", dlerror());
    exit(1);
  }
  *(void **)&create = symbol(library, "replayssm_context_create");
  *(void **)&destroy = symbol(library, "replayssm_context_destroy");
  *(void **)&message = symbol(library, "replayssm_last_error_message");
  desc.n_threads = 3;
  if (create(&desc, &context) != REPLAYSSM_OK || create(&desc, NULL) == REPLAYSSM_OK || message()[0] == 0) exit(2);
  destroy(context);
  if (dlclose(library) != 0) exit(3);
  return unused;
}

/* Whether the library is mapped. */
static int loaded(void) {
  char line[1024];
  int found = 0;
  FILE *maps = fopen("/proc/self/maps", "r");
  if (maps == NULL) exit(4);
  while (fgets(line, sizeof line, maps) != NULL) found |= strstr(line, "/libreplayssm.so") != NULL;
  fclose(maps);
  return found;
}

int main(int argc, char **argv) {
  int unloaded = 0;
  if (argc != 2) return 5;
  path = argv[1];
  for (int i = 0; i < 20; i++) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, plugin, NULL) != 0 || pthread_join(thread, NULL) != 0) return 6;
    /* What that thread still held is gone; glibc looks again at the next dlclose. */
    void *again = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (again == NULL || !loaded() || dlclose(again) != 0) return 7;
    unloaded += !loaded();
  }
#ifdef __GLIBC__
  if (unloaded != 20) return 8;
#endif
  printf("unload: unloaded %d of 20 times\n", unloaded);
  return 0;
}
