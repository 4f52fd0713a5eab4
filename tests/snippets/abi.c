/* Snippets of docs/ABI.md. C11 and C++17. SPDX-License-Identifier: MIT OR Apache-2.0 */
#include <replayssm.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void require(int condition, const char *what) {
  if (condition) return;
  fprintf(stderr, "%s is not true\n", what);
  exit(1);
}
#define REQUIRE(condition) require((condition), #condition)

int main(void) {
  /* >>> version */
  const uint32_t library = replayssm_version(); /* major << 24 | minor << 12 | patch */
  if (library >> 12 != REPLAYSSM_VERSION >> 12) {
    fprintf(stderr, "built for replayssm %d.%d, found %s\n", REPLAYSSM_VERSION_MAJOR, REPLAYSSM_VERSION_MINOR,
            replayssm_build_info());
    return 1;
  }
  /* <<< version */

  replayssm_context *context = NULL;
  /* A caller with a newer header: its descriptor is longer than what the library knows. */
  /* >>> newer */
  struct {
    replayssm_context_desc known;
    uint64_t new_option; /* a field of a later version */
  } newer;
  memset(&newer, 0, sizeof newer);
  newer.known.struct_size = (uint32_t)sizeof newer;
  replayssm_status status = replayssm_context_create(&newer.known, &context); /* 0: the default, so all is well */
  REQUIRE(status == REPLAYSSM_OK);
  replayssm_context_destroy(context);

  newer.new_option = 1;
  status = replayssm_context_create(&newer.known, &context); /* asks for something that the library cannot know */
  REQUIRE(status == REPLAYSSM_ERROR_UNSUPPORTED && context == NULL);
  puts(replayssm_last_error_message());
  /* the byte at offset 48 of replayssm_context_desc is not 0; this library supports the 48 bytes it knows */
  /* <<< newer */
  REQUIRE(strcmp(replayssm_last_error_message(),
                 "the byte at offset 48 of replayssm_context_desc is not 0; this library supports the 48 bytes it knows") == 0);

  /* A handle that is none. */
  int object = 0;
  replayssm_context_info info = REPLAYSSM_INIT(replayssm_context_info);
  REQUIRE(replayssm_context_query((const replayssm_context *)(const void *)&object, &info) == REPLAYSSM_ERROR_INVALID_HANDLE);
  REQUIRE(strcmp(replayssm_status_string(12345), "unknown status") == 0);
  puts("abi: ok");
  return 0;
}
