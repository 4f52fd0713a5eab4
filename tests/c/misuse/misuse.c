/* Every wrong way to call the library that one can think of: each gives a status and a sentence that names the field, writes
 * nothing, and leaves the library usable. Run plain, under sanitizers and under valgrind ("short" as an argument).
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "misuse.h"

int checks;
bool short_run;

replayssm_context *context;
replayssm_slots *slots;
replayssm_layers *mamba, *conv, *delta;

float data[1 << 14];
float out[1 << 14];
const int32_t ids[300] = {0};
const int32_t two_slots[2] = {0, 1};

void fail(const char *file, int line, const char *what, const char *detail) {
  fprintf(stderr, "%s:%d: %s: %s\n", file, line, what, detail);
  exit(1);
}

void forget_message(void) {
  if (replayssm_acquire(slots, -77, NULL, NULL) != REPLAYSSM_ERROR_INVALID_ARGUMENT) fail(__FILE__, __LINE__, "acquire(-77)", "accepted");
}

void failed(const char *file, int line, const char *call, replayssm_status wanted, const char *word, replayssm_status found) {
  const char *message = replayssm_last_error_message();
  char detail[512];
  checks++;
  snprintf(detail, sizeof detail, "%s, \"%s\"; expected %s and \"%s\"", replayssm_status_string(found), message,
           replayssm_status_string(wanted), word);
  if (found != wanted || strstr(message, word) == NULL || strstr(message, "-77") != NULL) fail(file, line, call, detail);
}

void worked(const char *file, int line, const char *call, replayssm_status found) {
  checks++;
  if (found != REPLAYSSM_OK) fail(file, line, call, replayssm_last_error_message());
}

void create_all(void) {
  replayssm_context_desc c = REPLAYSSM_INIT(replayssm_context_desc);
  replayssm_slots_desc s = good_slots();
  replayssm_pool_desc m = good_mamba(), v = good_conv(), k = good_delta();
  c.n_threads = 2;
  WORKS(replayssm_context_create(&c, &context));
  WORKS(replayssm_slots_create(context, &s, &slots));
  WORKS(replayssm_layers_create(slots, &m, NULL, 0, &mamba));
  WORKS(replayssm_layers_create(slots, &v, NULL, 0, &conv));
  WORKS(replayssm_layers_create(slots, &k, NULL, 0, &delta));
  for (int i = 0; i < 1 << 14; i++) data[i] = (float)(i % 13 - 6) * 0.125f;
}

void destroy_all(void) {
  replayssm_layers_destroy(delta);
  replayssm_layers_destroy(conv);
  replayssm_layers_destroy(mamba);
  replayssm_slots_destroy(slots);
  replayssm_context_destroy(context);
}

int main(int argc, char **argv) {
  short_run = argc > 1 && strcmp(argv[1], "short") == 0;
  CHECK(strcmp(replayssm_last_error_message(), "") == 0);
  CHECK(replayssm_version() == REPLAYSSM_VERSION);
  create_all();
  handles();
  destroying();
  descriptors();
  creation();
  lending();
  calls();
  delta_calls();
  lists();
  copies();
  device_faults();
  ids_and_buffers();
  threads();
  destroy_all();
  everything_is_gone();
  printf("misuse: %d checks passed\n", checks);
  return 0;
}

