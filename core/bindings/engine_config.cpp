// Settings of the simulated engine in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "convert.hpp"
#include "engine.hpp"
#include "engine/vllm/engine.hpp"
#include "policy_config.hpp"

namespace understudy {

namespace {

using namespace nb::literals;

template <typename Enum>
Enum read_choice(const std::string& value, const char* field,
                 std::initializer_list<std::pair<const char*, Enum>> choices) {
  std::string known;
  for (const auto& [name, choice] : choices) {
    if (value == name) return choice;
    known.append(known.empty() ? "" : ", ").append(name);
  }
  throw Error(ErrorKind::ConfigError, field, " must be one of ", known, "; got '", value, "'");
}

std::uint32_t read_limit(nb::handle value, const char* field) {
  if (value.is_none()) return VllmConfig::kUnlimited;
  return static_cast<std::uint32_t>(read_uint(value, field, VllmConfig::kUnlimited - 1));
}

void make_config(VllmConfig* self, Int block_size, Int num_gpu_blocks, Int max_num_seqs, Int max_num_batched_tokens,
                 Int max_model_len, Int long_prefill_token_threshold, bool enable_prefix_caching,
                 bool enable_chunked_prefill, const std::string& policy, const std::string& preemption_mode,
                 bool scheduler_reserve_full_isl, double watermark, bool async_scheduling,
                 const std::string& kv_manager, PolicyMakerArg eviction_policy, const MockerSettings* mocker,
                 const Speculation* speculation, const std::string& free_order, bool phantom_hits,
                 bool caps_lone_prefill, Int max_num_active_seqs, bool long_prefill_token_threshold_adaptive,
                 bool events, bool kv_trace, bool check, Int max_loras, bool preempted_first,
                 const VllmOffload* offload, double stay_sample, bool self_preemption_ends, bool counts_running_loras,
                 Int prefill_schedule_interval) {
  VllmConfig config;
  config.block_size = static_cast<std::uint32_t>(read_uint(block_size, "block_size", BlockStore::kMaxBlockSize));
  config.num_gpu_blocks = read_uint(num_gpu_blocks, "num_gpu_blocks", BlockStore::kMaxBlocks);
  config.max_num_seqs = read_limit(max_num_seqs, "max_num_seqs");
  config.max_num_batched_tokens = read_limit(max_num_batched_tokens, "max_num_batched_tokens");
  config.max_model_len = read_limit(max_model_len, "max_model_len");
  config.long_prefill_token_threshold = static_cast<std::uint32_t>(
      read_uint(long_prefill_token_threshold, "long_prefill_token_threshold", VllmConfig::kUnlimited - 1));
  config.enable_prefix_caching = enable_prefix_caching;
  config.enable_chunked_prefill = enable_chunked_prefill;
  config.policy = read_choice<SchedulingPolicy>(
      policy, "policy", {{"fcfs", SchedulingPolicy::Fcfs}, {"priority", SchedulingPolicy::Priority}});
  config.preemption_mode = read_choice<PreemptionMode>(
      preemption_mode, "preemption_mode", {{"lifo", PreemptionMode::Lifo}, {"fifo", PreemptionMode::Fifo}});
  config.scheduler_reserve_full_isl = scheduler_reserve_full_isl;
  config.watermark = watermark;
  config.async_scheduling = async_scheduling;
  if (mocker != nullptr) config.mocker = *mocker;
  if (speculation != nullptr) config.speculation = *speculation;
  config.free_order = read_choice<FreeOrder>(free_order, "free_order",
                                             {{"unkeyed_first", FreeOrder::UnkeyedFirst},
                                              {"all_last", FreeOrder::AllLast},
                                              {"uncached_last", FreeOrder::UncachedLast}});
  config.phantom_hits = phantom_hits;
  config.caps_lone_prefill = caps_lone_prefill;
  config.max_num_active_seqs = read_limit(max_num_active_seqs, "max_num_active_seqs");
  config.long_prefill_token_threshold_adaptive = long_prefill_token_threshold_adaptive;
  config.kv_manager = read_choice<KvManagerKind>(kv_manager, "kv_manager",
                                                 {{"native", KvManagerKind::Native}, {"kvbm", KvManagerKind::Kvbm}});
  if (!eviction_policy.is_none()) {
    config.eviction = read_policy_maker(eviction_policy);
    config.eviction_is_users = !nb::isinstance<nb::str>(eviction_policy);
  }
  config.max_loras = read_limit(max_loras, "max_loras");
  config.preempted_first = preempted_first;
  if (offload != nullptr) config.offload = *offload;
  config.events = events;
  config.kv_trace = kv_trace;
  config.stay_sample = stay_sample;
  config.self_preemption_ends = self_preemption_ends;
  config.counts_running_loras = counts_running_loras;
  config.prefill_schedule_interval =
      static_cast<std::uint32_t>(read_uint(prefill_schedule_interval, "prefill_schedule_interval", 1u << 30));
  config.check = check;
  new (self) VllmConfig(config);
}

}  // namespace

void bind_engine_config(nb::module_& m) {
  nb::class_<Speculation>(m, "Speculation", "Speculative decoding: demands on the scheduler, and acceptance rates.")
      .def(
          "__init__",
          [](Speculation* self, std::uint32_t tokens, std::uint32_t lookahead, std::uint32_t draft_slots,
             std::uint32_t reserved_slots, bool drops_last_hit, std::uint32_t hashed_ahead, bool keys_in_update,
             bool pads_admissions, bool pads_hits, bool pads_within_context, bool admission_lookahead,
             std::vector<double> accept_rates, std::uint64_t seed) {
            new (self) Speculation{tokens,
                                   lookahead,
                                   draft_slots,
                                   reserved_slots,
                                   drops_last_hit,
                                   hashed_ahead,
                                   keys_in_update,
                                   pads_admissions,
                                   pads_hits,
                                   pads_within_context,
                                   admission_lookahead,
                                   std::move(accept_rates),
                                   seed};
          },
          nb::kw_only(), "tokens"_a = 0, "lookahead"_a = 0, "draft_slots"_a = 0, "reserved_slots"_a = 0,
          "drops_last_hit"_a = false, "hashed_ahead"_a = 0, "keys_in_update"_a = false, "pads_admissions"_a = true,
          "pads_hits"_a = true, "pads_within_context"_a = true, "admission_lookahead"_a = true,
          "accept_rates"_a = nb::list(), "seed"_a = 42);

  nb::class_<MockerSettings>(m, "MockerSettings", "Settings that imitate Dynamo's mocker and its replay.")
      .def(
          "__init__",
          [](MockerSettings* self, double speedup_ratio, double decode_speedup_ratio, bool charge_first_token,
             std::vector<double> accept_rates, Int burst_seed, bool route_rejected) {
            new (self) MockerSettings{{speedup_ratio, decode_speedup_ratio},
                                      charge_first_token,
                                      std::move(accept_rates),
                                      read_uint(burst_seed, "burst_seed"),
                                      route_rejected};
          },
          nb::kw_only(), "speedup_ratio"_a = 1.0, "decode_speedup_ratio"_a = 1.0, "charge_first_token"_a = true,
          "accept_rates"_a = nb::list(), "burst_seed"_a = 42, "route_rejected"_a = false)
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
  nb::class_<VllmConfig, EngineConfig>(m, "VllmEngineConfig", "Settings of a vLLM engine, with vLLM's names.")
      .def("__init__", &make_config, nb::kw_only(), "block_size"_a = 64, "num_gpu_blocks"_a = 16384,
           "max_num_seqs"_a.none() = 256, "max_num_batched_tokens"_a.none() = 8192,
           "max_model_len"_a.none() = nb::none(), "long_prefill_token_threshold"_a = 0,
           "enable_prefix_caching"_a = true, "enable_chunked_prefill"_a = true, "policy"_a = "fcfs",
           "preemption_mode"_a = "lifo", "scheduler_reserve_full_isl"_a = true, "watermark"_a = 0.0,
           "async_scheduling"_a = false, "kv_manager"_a = "native", "eviction_policy"_a.none() = nb::none(),
           "mocker"_a.none() = nb::none(), "speculation"_a.none() = nb::none(), "free_order"_a = "unkeyed_first",
           "phantom_hits"_a = true, "caps_lone_prefill"_a = true, "max_num_active_seqs"_a.none() = nb::none(),
           "long_prefill_token_threshold_adaptive"_a = false, "events"_a = false, "kv_trace"_a = false,
           "check"_a = false, "max_loras"_a.none() = nb::none(), "preempted_first"_a = true,
           "offload"_a.none() = nb::none(), "stay_sample"_a = 0.0, "self_preemption_ends"_a = true,
           "counts_running_loras"_a = false, "prefill_schedule_interval"_a = 1);
}

}  // namespace understudy
