/* Snippets of docs/INTEGRATION.md: what a pool will cost, before it is there. C11 and C++17. SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "engine.h"

static int lines;

/* >>> log */
static void on_log(void *user, replayssm_log_level level, const char *text) {
  fprintf((FILE *)user, "%s %s\n", level == REPLAYSSM_LOG_WARNING ? "warning:" : "", text);
  lines += 1;
}
/* <<< log */

int main(void) {
  FILE *sink = tmpfile();
  REQUIRE(sink != NULL);
  /* >>> context */
  replayssm_context_desc desc = REPLAYSSM_INIT(replayssm_context_desc);
  desc.log = on_log; /* lines about what is created and destroyed, and warnings; never from a step or a commit */
  desc.log_user = sink;
  desc.log_level = REPLAYSSM_LOG_INFO;
  replayssm_context *context;
  check(replayssm_context_create(&desc, &context));
  /* <<< context */
  REQUIRE(lines > 0);

  /* >>> supports */
  replayssm_pool_desc pool = REPLAYSSM_INIT(replayssm_pool_desc);
  pool.family = REPLAYSSM_FAMILY_GDN;
  pool.n_layers = 24;
  pool.io = REPLAYSSM_DTYPE_BF16;
  pool.H = 16, pool.HV = 32, pool.K = 128, pool.V = 128;
  check(replayssm_supports(context, &pool, 4)); /* steps of one sampled token and three drafts; nothing is created */
  /* <<< supports */
  pool.K = 1000;
  REQUIRE(replayssm_supports(context, &pool, 4) != REPLAYSSM_OK);
  pool.K = 128;
  pool.n_layers = 1;

  replayssm_slots_desc desc_of_slots = REPLAYSSM_INIT(replayssm_slots_desc);
  desc_of_slots.n_slots = 2;
  desc_of_slots.max_step_tokens = 4;
  replayssm_slots *slots;
  replayssm_layers *layers;
  check(replayssm_slots_create(context, &desc_of_slots, &slots));
  check(replayssm_layers_create(slots, &pool, NULL, 0, &layers));
  /* >>> explain */
  char text[4096]; /* always enough */
  check(replayssm_explain(layers, 2, 4, text, sizeof text)); /* steps of 2 rows of 4 tokens */
  fputs(text, sink);
  /* <<< explain */
  REQUIRE(strstr(text, "bytes") != NULL);
  const int before = lines;
  replayssm_layers_destroy(layers);
  replayssm_slots_destroy(slots);
  replayssm_context_destroy(context);
  REQUIRE(lines == before + 3);
  fclose(sink);
  puts("ask: ok");
  return 0;
}
