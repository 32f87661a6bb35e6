// Settings of a simulated SGLang engine in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <map>
#include <optional>
#include <string>

#include "bindings.hpp"
#include "engine/sglang/engine.hpp"
#include "exclusive_class.hpp"

namespace understudy {

void bind_sglang_settings(nb::module_& m);

namespace {

using namespace nb::literals;

template <typename Value>
Value read_name(const std::string& name, const char* field, const std::map<std::string, Value>& known) {
  const auto found = known.find(name);
  if (found != known.end()) return found->second;
  std::string names;
  for (const auto& [each, value] : known) names += (names.empty() ? "" : ", ") + each;
  throw Error(ErrorKind::ConfigError, field, " must be one of ", names, "; got '", name, "'");
}

}  // namespace

void bind_sglang_settings(nb::module_& m) {
  nb::class_<SglangSettings>(m, "SglangSettings", "Settings of SGLang's scheduler, with SGLang's names.")
      .def(nb::init<>())
      .def_rw("page_size", &SglangSettings::page_size)
      .def_rw("max_total_num_tokens", &SglangSettings::max_total_num_tokens)
      .def_rw("max_running_requests", &SglangSettings::max_running_requests)
      .def_rw("max_prefill_tokens", &SglangSettings::max_prefill_tokens)
      .def_rw("chunked_prefill_size", &SglangSettings::chunked_prefill_size)
      .def_rw("prefill_max_requests", &SglangSettings::prefill_max_requests, nb::arg().none())
      .def_rw("schedule_conservativeness", &SglangSettings::schedule_conservativeness)
      .def_rw("init_new_token_ratio", &SglangSettings::init_new_token_ratio)
      .def_rw("min_new_token_ratio_factor", &SglangSettings::min_new_token_ratio_factor)
      .def_rw("new_token_ratio_decay_steps", &SglangSettings::new_token_ratio_decay_steps)
      .def_rw("retract_decode_steps", &SglangSettings::retract_decode_steps)
      .def_rw("clip_max_new_tokens", &SglangSettings::clip_max_new_tokens)
      .def_rw("in_batch_check_threshold", &SglangSettings::in_batch_check_threshold)
      .def_rw("in_batch_deprioritize_threshold", &SglangSettings::in_batch_deprioritize_threshold)
      .def_rw("enable_mixed_chunk", &SglangSettings::enable_mixed_chunk)
      .def_rw("disable_radix_cache", &SglangSettings::disable_radix_cache)
      .def_rw("ignore_eos", &SglangSettings::ignore_eos)
      .def_rw("overlap", &SglangSettings::overlap)
      .def_rw("context_len", &SglangSettings::context_len)
      .def_rw("enable_priority_scheduling", &SglangSettings::enable_priority_scheduling)
      .def_rw("priority_scheduling_preemption_threshold", &SglangSettings::priority_scheduling_preemption_threshold)
      .def_rw("schedule_low_priority_values_first", &SglangSettings::schedule_low_priority_values_first)
      .def_rw("disable_priority_preemption", &SglangSettings::disable_priority_preemption)
      .def_rw("max_queued_requests", &SglangSettings::max_queued_requests, nb::arg().none())
      .def_rw("prefill_decode_interval", &SglangSettings::prefill_decode_interval)
      .def_rw("prefill_decode_interval_min_bs", &SglangSettings::prefill_decode_interval_min_bs)
      .def_rw("decode_log_interval", &SglangSettings::decode_log_interval)
      .def_rw("swa_window", &SglangSettings::swa_window, nb::arg().none())
      .def_rw("swa_tokens", &SglangSettings::swa_tokens)
      .def_rw("swa_eviction_interval", &SglangSettings::swa_eviction_interval)
      .def_rw("release_prefill_swa", &SglangSettings::release_prefill_swa)
      .def_rw("mamba_slots", &SglangSettings::mamba_slots, nb::arg().none())
      .def_rw("mamba_extra_buffer", &SglangSettings::mamba_extra_buffer)
      .def_rw("mamba_lazy", &SglangSettings::mamba_lazy)
      .def_rw("mamba_track_interval", &SglangSettings::mamba_track_interval)
      .def_rw("mamba_max_states_per_path", &SglangSettings::mamba_max_states_per_path)
      .def(
          "set_side",
          [](SglangSettings& self, const std::string& role, std::optional<std::uint32_t> metadata_slots,
             bool early_send, std::uint32_t num_reserved_decode_tokens, std::optional<std::uint32_t> extra_slots,
             std::uint32_t polling_interval, bool backs_up_retracted, std::optional<std::uint64_t> host_tokens,
             bool decode_radix) {
            self.side = {
                read_name<SglangRole>(
                    role, "disaggregation_mode",
                    {{"null", SglangRole::Unified}, {"prefill", SglangRole::Prefill}, {"decode", SglangRole::Decode}}),
                metadata_slots,
                early_send,
                num_reserved_decode_tokens,
                extra_slots,
                polling_interval,
                decode_radix,
                backs_up_retracted,
                host_tokens};
          },
          nb::kw_only(), "role"_a, "metadata_slots"_a.none() = nb::none(), "early_send"_a = true,
          "num_reserved_decode_tokens"_a = 512, "extra_slots"_a.none() = nb::none(), "polling_interval"_a = 1,
          "backs_up_retracted"_a = true, "host_tokens"_a.none() = nb::none(), "decode_radix"_a = false,
          "Make it one side of a disaggregated server.")
      .def(
          "set_host",
          [](SglangSettings& self, const std::string& hicache_write_policy, double hicache_ratio,
             std::uint32_t load_back_threshold, std::uint64_t tokens) {
            self.host =
                HostSettings{read_name<HostWritePolicy>(hicache_write_policy, "hicache_write_policy",
                                                        {{"write_through", HostWritePolicy::WriteThrough},
                                                         {"write_through_selective", HostWritePolicy::Selective},
                                                         {"write_back", HostWritePolicy::WriteBack}}),
                             hicache_ratio, tokens, load_back_threshold};
          },
          nb::kw_only(), "hicache_write_policy"_a, "hicache_ratio"_a, "load_back_threshold"_a, "tokens"_a = 0,
          "Add a host tier below the device.")
      .def(
          "set_names",
          [](SglangSettings& self, const std::string& schedule_policy, const std::string& radix_eviction_policy,
             const std::string& retraction_policy, const std::string& tree) {
            self.schedule_policy = read_name<SglangPolicy>(schedule_policy, "schedule_policy",
                                                           {{"fcfs", SglangPolicy::Fcfs},
                                                            {"lpm", SglangPolicy::Lpm},
                                                            {"dfs-weight", SglangPolicy::DfsWeight},
                                                            {"lof", SglangPolicy::Lof}});
            self.radix_eviction_policy = read_name<RadixEviction>(radix_eviction_policy, "radix_eviction_policy",
                                                                  {{"lru", RadixEviction::Lru},
                                                                   {"lfu", RadixEviction::Lfu},
                                                                   {"slru", RadixEviction::Slru},
                                                                   {"fifo", RadixEviction::Fifo},
                                                                   {"filo", RadixEviction::Filo},
                                                                   {"mru", RadixEviction::Mru}});
            self.retracts_by_priority =
                read_name<bool>(retraction_policy, "retraction_policy", {{"length", false}, {"priority", true}});
            self.older_tree = read_name<bool>(tree, "tree", {{"unified", false}, {"radix", true}});
          },
          nb::kw_only(), "schedule_policy"_a, "radix_eviction_policy"_a, "retraction_policy"_a, "tree"_a);
  nb::class_<SglangConfig, EngineConfig>(m, "SglangEngineConfig", "Settings of a simulated SGLang engine.")
      .def(
          "__init__",
          [](SglangConfig* self, const SglangSettings& settings, bool events, bool route_rejected, bool check) {
            SglangConfig config;
            config.settings = settings;
            config.block_size = settings.page_size;
            config.num_gpu_blocks = settings.max_total_num_tokens / settings.page_size;
            const std::int64_t chunk = settings.chunked_prefill_size;
            config.max_num_batched_tokens = static_cast<std::uint32_t>(chunk > 0 ? chunk : settings.max_prefill_tokens);
            config.max_model_len = settings.context_len;
            config.enable_prefix_caching = !settings.disable_radix_cache;
            config.events = events;
            config.check = check;
            config.mocker.route_rejected = route_rejected;
            new (self) SglangConfig(config);
          },
          "settings"_a, nb::kw_only(), "events"_a = false, "route_rejected"_a = false, "check"_a = false);
  m.def(
      "with_role",
      [](const SglangConfig& self, const std::string& role) {
        SglangConfig config = self;
        config.settings.side.role = role == "prefill" ? SglangRole::Prefill : SglangRole::Decode;
        if (role != "prefill") {
          config.settings.disable_radix_cache = !config.settings.side.decode_radix;
          config.enable_prefix_caching = config.settings.side.decode_radix;
        }
        return config;
      },
      "config"_a, "role"_a, "A copy whose engines are one side of a disaggregated server: prefill or decode.");
  nb::class_<SglangTokens>(m, "SglangTokens", "Tokens of an engine's pools, and what its host tier has copied.")
      .def_ro("available", &SglangTokens::available)
      .def_ro("evictable", &SglangTokens::evictable)
      .def_ro("evicted", &SglangTokens::evicted)
      .def_ro("new_token_ratio", &SglangTokens::new_token_ratio)
      .def_ro("part_total", &SglangTokens::part_total)
      .def_ro("part_available", &SglangTokens::part_available)
      .def_ro("part_evictable", &SglangTokens::part_evictable)
      .def_ro("host_used", &SglangTokens::host_used)
      .def_ro("host_total", &SglangTokens::host_total)
      .def_prop_ro("backed_up", [](const SglangTokens& self) { return self.host.stored; })
      .def_prop_ro("loaded_back", [](const SglangTokens& self) { return self.host.loaded; })
      .def_prop_ro("dropped", [](const SglangTokens& self) { return self.host.dropped; })
      .def_ro("retracted_inputs", &SglangTokens::retracted_inputs)
      .def_ro("retracted_outputs", &SglangTokens::retracted_outputs);
  ExclusiveClass<SglangEngine, Engine>(
      m, "SglangEngine", "An engine with SGLang's scheduler. A second caller at a time raises WrongState.")
      .def_prop_ro("tokens", &SglangEngine::tokens)
      .def("set_link_share", &SglangEngine::set_link_share, "now_ns"_a, "tier"_a, "share"_a,
           "Set the share of bandwidth of the links to and from the host, 0.001 to 1, for later copies.");
}

}  // namespace understudy
