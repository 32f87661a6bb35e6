#include <nanobind/nanobind.h>

#include "bindings.hpp"

NB_MODULE(_core, m) {
  m.doc() = "The native core of Understudy. Use the typed modules of the package, which re-export what is public.";
  understudy::bind_errors(m);
  understudy::bind_identities(m);
  understudy::bind_tokens(m);
  understudy::bind_store(m);
  understudy::bind_events(m);
  understudy::bind_wire(m);
  understudy::bind_consolidate(m);
  understudy::bind_guards(m);
  understudy::bind_request_kv(m);
  understudy::bind_links(m);
  understudy::bind_tiers(m);
  understudy::bind_timing(m);
  understudy::bind_offload(m);
  understudy::bind_engine(m);
  understudy::bind_engine_config(m);
  understudy::bind_vllm_engine(m);
  understudy::bind_groups(m);
  understudy::bind_handoff(m);
  understudy::bind_sglang(m);
  understudy::bind_trtllm(m);
  understudy::bind_kv_manager(m);
  understudy::bind_prefix_index(m);
  understudy::bind_router(m);
  understudy::bind_kv_router(m);
  understudy::bind_step_table(m);
  understudy::bind_traces(m);
  understudy::bind_replay(m);
  understudy::bind_run_columns(m);
  understudy::bind_curves(m);
#ifdef UNDERSTUDY_TEST_ENGINES
  understudy::bind_test_engines(m);
  understudy::bind_test_pool(m);
#endif
}
