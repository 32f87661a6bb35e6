// Settings of the simulated engine in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "convert.hpp"
#include "engine.hpp"
#include "engine/vllm/engine.hpp"
#include "fields.hpp"
#include "policy_config.hpp"

namespace understudy {

namespace {

using namespace nb::literals;

void read_eviction(VllmConfig& self, nb::handle policy) {
  if (policy.is_none()) return;
  self.eviction = read_policy_maker(policy);
  self.eviction_is_users = !nb::isinstance<nb::str>(policy);
}

}  // namespace

void bind_engine_config(nb::module_& m) {
  nb::class_<Speculation> speculation(m, "Speculation",
                                      "Speculative decoding: demands on the scheduler, and acceptance rates.");
  Fields<Speculation>()
      .add("tokens", &Speculation::tokens)
      .add("lookahead", &Speculation::lookahead)
      .add("draft_slots", &Speculation::draft_slots)
      .add("reserved_slots", &Speculation::reserved_slots)
      .add("drops_last_hit", &Speculation::drops_last_hit)
      .add("hashed_ahead", &Speculation::hashed_ahead)
      .add("keys_in_update", &Speculation::keys_in_update)
      .add("pads_admissions", &Speculation::pads_admissions)
      .add("pads_hits", &Speculation::pads_hits)
      .add("pads_within_context", &Speculation::pads_within_context)
      .add("admission_lookahead", &Speculation::admission_lookahead)
      .add("accept_rates", &Speculation::accept_rates)
      .add("seed", &Speculation::seed)
      .bind(speculation);

  nb::class_<MockerSettings> mocker(m, "MockerSettings", "Settings that imitate Dynamo's mocker and its replay.");
  Fields<MockerSettings>()
      .add("speedup_ratio", [](MockerSettings& self) -> double& { return self.speedups.all; })
      .add("decode_speedup_ratio", [](MockerSettings& self) -> double& { return self.speedups.decode; })
      .add("charge_first_token", &MockerSettings::charge_first_token)
      .add("accept_rates", &MockerSettings::accept_rates)
      .add("burst_seed", &MockerSettings::burst_seed)
      .add("route_rejected", &MockerSettings::route_rejected)
      .bind(mocker)
      .def("apply_to", &MockerSettings::apply_to, "timing"_a,
           "A copy of the timing with these settings. ConfigError: the model times whole steps, not decoding apart.");

  nb::class_<EngineConfig>(m, "EngineConfig", "Settings of an engine of any kind.")
      .def_ro("block_size", &EngineConfig::block_size)
      .def_ro("num_gpu_blocks", &EngineConfig::num_gpu_blocks)
      .def_prop_ro("hashed_ahead", &EngineConfig::hashed_ahead, "Tokens behind a block that are part of its identity.")
      .def("make_engine", &make_engine, "timing"_a, nb::kw_only(), "tiers"_a.none() = nb::none(),
           "run"_a.none() = nb::none(), "name"_a = "worker", "net"_a.none() = nb::none(), "worker"_a = 0,
           nb::keep_alive<0, 4>(), nb::keep_alive<0, 6>(),
           "Make an engine of this kind, with `tiers`, and `run` where several engines share them; with `net`, as its "
           "worker `worker`.");
  nb::class_<VllmConfig, EngineConfig> vllm(m, "VllmEngineConfig", "Settings of a vLLM engine, with vLLM's names.");
  Fields<VllmConfig>()
      .add("block_size", &VllmConfig::block_size, BlockStore::kMaxBlockSize)
      .add("num_gpu_blocks", &VllmConfig::num_gpu_blocks, BlockStore::kMaxBlocks)
      .add_limit("max_num_seqs", &VllmConfig::max_num_seqs)
      .add_limit("max_num_batched_tokens", &VllmConfig::max_num_batched_tokens)
      .add_limit("max_model_len", &VllmConfig::max_model_len)
      .add("long_prefill_token_threshold", &VllmConfig::long_prefill_token_threshold, VllmConfig::kUnlimited - 1)
      .add("enable_prefix_caching", &VllmConfig::enable_prefix_caching)
      .add("enable_chunked_prefill", &VllmConfig::enable_chunked_prefill)
      .add_choice("scheduling_policy", &VllmConfig::policy,
                  {{"fcfs", SchedulingPolicy::Fcfs}, {"priority", SchedulingPolicy::Priority}})
      .add_choice("preemption_mode", &VllmConfig::preemption_mode,
                  {{"lifo", PreemptionMode::Lifo}, {"fifo", PreemptionMode::Fifo}})
      .add("scheduler_reserve_full_isl", &VllmConfig::scheduler_reserve_full_isl)
      .add("watermark", &VllmConfig::watermark)
      .add("async_scheduling", &VllmConfig::async_scheduling)
      .add("pipeline_parallel_size", &VllmConfig::pipeline_parallel_size, 1u << 10)
      .add("spaces_decodes", &VllmConfig::spaces_decodes)
      .add_choice("kv_manager", &VllmConfig::kv_manager,
                  {{"native", KvManagerKind::Native}, {"kvbm", KvManagerKind::Kvbm}})
      .add("eviction_policy", kPolicyMakerType + " | None", "None", &read_eviction)
      .add_object("mocker", &VllmConfig::mocker)
      .add_object("speculation", &VllmConfig::speculation)
      .add_choice("free_order", &VllmConfig::free_order,
                  {{"unkeyed_first", FreeOrder::UnkeyedFirst},
                   {"all_last", FreeOrder::AllLast},
                   {"uncached_last", FreeOrder::UncachedLast}})
      .add("phantom_hits", &VllmConfig::phantom_hits)
      .add("caps_lone_prefill", &VllmConfig::caps_lone_prefill)
      .add_limit("max_num_active_seqs", &VllmConfig::max_num_active_seqs)
      .add("long_prefill_token_threshold_adaptive", &VllmConfig::long_prefill_token_threshold_adaptive)
      .add("events", &VllmConfig::events)
      .add("kv_trace", &VllmConfig::kv_trace)
      .add("check", &VllmConfig::check)
      .add_limit("max_loras", &VllmConfig::max_loras)
      .add("preempted_first", &VllmConfig::preempted_first)
      .add("offload", &VllmConfig::offload)
      .add("stay_sample", &VllmConfig::stay_sample)
      .add("self_preemption_ends", &VllmConfig::self_preemption_ends)
      .add("counts_running_loras", &VllmConfig::counts_running_loras)
      .add("prefill_schedule_interval", &VllmConfig::prefill_schedule_interval, 1u << 30)
      .bind(vllm);
}

}  // namespace understudy
