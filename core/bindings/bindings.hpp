// One function per binding file, which adds its names to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace understudy {

void bind_errors(nanobind::module_& m);
void bind_identities(nanobind::module_& m);
void bind_curves(nanobind::module_& m);
void bind_tokens(nanobind::module_& m);
void bind_events(nanobind::module_& m);
void bind_wire(nanobind::module_& m);
void bind_consolidate(nanobind::module_& m);
void bind_guards(nanobind::module_& m);
void bind_store(nanobind::module_& m);
void bind_request_kv(nanobind::module_& m);
void bind_links(nanobind::module_& m);
void bind_tiers(nanobind::module_& m);
void bind_timing(nanobind::module_& m);
void bind_offload(nanobind::module_& m);
void bind_engine_config(nanobind::module_& m);
void bind_engine(nanobind::module_& m);
void bind_sglang(nanobind::module_& m);
void bind_trtllm(nanobind::module_& m);
void bind_groups(nanobind::module_& m);
void bind_handoff(nanobind::module_& m);
void bind_vllm_engine(nanobind::module_& m);
void bind_kv_manager(nanobind::module_& m);
void bind_prefix_index(nanobind::module_& m);
void bind_router(nanobind::module_& m);
void bind_kv_router(nanobind::module_& m);
void bind_replay(nanobind::module_& m);
void bind_run_columns(nanobind::module_& m);
void bind_step_table(nanobind::module_& m);
void bind_traces(nanobind::module_& m);
void bind_test_engines(nanobind::module_& m);
void bind_test_pool(nanobind::module_& m);

}  // namespace understudy
