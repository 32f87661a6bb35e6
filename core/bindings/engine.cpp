// The simulated engine in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "convert.hpp"
#include "engine/vllm/engine.hpp"
#include "policy_config.hpp"
#include "turn_class.hpp"

namespace understudy {

nb::object take_offload_line(VllmEngine& engine);  // offload.cpp

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
  if (value.is_none()) return EngineConfig::kUnlimited;
  return static_cast<std::uint32_t>(read_uint(value, field, EngineConfig::kUnlimited - 1));
}

void make_config(EngineConfig* self, nb::handle block_size, nb::handle num_gpu_blocks, nb::handle max_num_seqs,
                 nb::handle max_num_batched_tokens, nb::handle max_model_len, nb::handle long_prefill_token_threshold,
                 bool enable_prefix_caching, bool enable_chunked_prefill, const std::string& policy,
                 const std::string& preemption_mode, bool scheduler_reserve_full_isl, double watermark,
                 bool async_scheduling, const std::string& kv_manager, nb::handle eviction_policy,
                 const std::vector<double>& accept_rates, nb::handle burst_seed, const Speculation& speculation,
                 const std::string& free_order, bool phantom_hits, bool caps_lone_prefill,
                 nb::handle max_num_active_seqs, bool long_prefill_token_threshold_adaptive, bool events, bool kv_trace,
                 bool check, nb::handle max_loras, bool preempted_first, const VllmOffload* offload) {
  EngineConfig config;
  config.block_size = static_cast<std::uint32_t>(read_uint(block_size, "block_size", BlockStore::kMaxBlockSize));
  config.num_gpu_blocks = read_uint(num_gpu_blocks, "num_gpu_blocks", BlockStore::kMaxBlocks);
  config.max_num_seqs = read_limit(max_num_seqs, "max_num_seqs");
  config.max_num_batched_tokens = read_limit(max_num_batched_tokens, "max_num_batched_tokens");
  config.max_model_len = read_limit(max_model_len, "max_model_len");
  config.long_prefill_token_threshold = static_cast<std::uint32_t>(
      read_uint(long_prefill_token_threshold, "long_prefill_token_threshold", EngineConfig::kUnlimited - 1));
  config.enable_prefix_caching = enable_prefix_caching;
  config.enable_chunked_prefill = enable_chunked_prefill;
  config.policy = read_choice<SchedulingPolicy>(
      policy, "policy", {{"fcfs", SchedulingPolicy::Fcfs}, {"priority", SchedulingPolicy::Priority}});
  config.preemption_mode = read_choice<PreemptionMode>(
      preemption_mode, "preemption_mode", {{"lifo", PreemptionMode::Lifo}, {"fifo", PreemptionMode::Fifo}});
  config.scheduler_reserve_full_isl = scheduler_reserve_full_isl;
  config.watermark = watermark;
  config.async_scheduling = async_scheduling;
  config.accept_rates = accept_rates;
  config.burst_seed = read_uint(burst_seed, "burst_seed");
  config.speculation = speculation;
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
  config.check = check;
  new (self) EngineConfig(config);
}

RequestId submit(VllmEngine& self, const std::string& name, nb::handle prompt_tokens, nb::handle max_tokens,
                 const Identities* identities, std::int64_t priority, double arrival_time, nb::handle eos_at,
                 const std::optional<std::vector<std::uint32_t>>& accepts, nb::handle adapter) {
  RequestSpec spec;
  spec.name = name;
  spec.prompt_tokens = static_cast<std::uint32_t>(read_uint(prompt_tokens, "prompt_tokens", 1u << 30));
  spec.max_tokens = static_cast<std::uint32_t>(read_uint(max_tokens, "max_tokens", 1u << 30));
  if (!eos_at.is_none()) {
    spec.eos_at = static_cast<std::uint32_t>(read_uint(eos_at, "eos_at", 1u << 30));
    if (spec.eos_at == 0) throw Error(ErrorKind::InvalidArgument, "request ", name, ": eos_at counts from 1");
  }
  if (accepts) {
    if (accepts->empty()) throw Error(ErrorKind::InvalidArgument, "request ", name, ": accepts must not be empty");
    spec.accepts = std::make_shared<const std::vector<std::uint32_t>>(*accepts);
  }
  spec.priority = priority;
  spec.adapter = static_cast<std::uint32_t>(read_uint(adapter, "adapter", 0xFFFFFFFFu));
  spec.arrival_time = arrival_time;
  if (identities != nullptr) {
    // The last token is never computed, so it fills no block.
    const std::uint64_t end = std::min<std::uint64_t>(std::uint64_t{spec.prompt_tokens} + std::max(spec.outputs(), 1u),
                                                      self.config().max_model_len);
    // Under vLLM's offload even its chunk may be looked for.
    const std::uint64_t named = end > 0 && !self.config().offload ? end - 1 : end;
    const std::uint64_t full = named / self.config().block_size;
    if (self.config().enable_prefix_caching && identities->size() < full) {
      throw Error(ErrorKind::InvalidArgument, "request ", name, ": identities name ", identities->size(),
                  " blocks, prompt and output fill ", full);
    }
    spec.identities = std::make_shared<GivenIdentities>(*identities);
  }
  return self.submit(std::move(spec));
}

std::vector<std::pair<RequestId, std::uint32_t>> scheduled(const VllmEngine& self) {
  std::vector<std::pair<RequestId, std::uint32_t>> out;
  for (const Scheduled& turn : self.log().scheduled) out.emplace_back(turn.id, turn.tokens);
  return out;
}

std::vector<std::tuple<RequestId, bool, std::uint32_t>> admitted(const VllmEngine& self) {
  std::vector<std::tuple<RequestId, bool, std::uint32_t>> out;
  const StepLog& log = self.log();
  for (std::size_t i = 0; i < log.admitted.size(); ++i)
    out.emplace_back(log.admitted[i], log.resumed[i], log.cached[i]);
  return out;
}

using TraceRow = std::tuple<std::int64_t, bool, std::size_t, std::uint64_t, std::uint64_t, std::uint64_t>;

std::vector<TraceRow> trace_rows(const std::vector<TimedKvTrace>& trace) {
  std::vector<TraceRow> out;
  for (const auto& [time_ns, r] : trace) out.emplace_back(time_ns, r.eviction, r.blocks, r.free, r.active, r.inactive);
  return out;
}

std::tuple<std::uint64_t, std::uint64_t, std::uint64_t> pool_counts(const VllmEngine& self) {
  const PoolMetrics m = self.store().metrics(0);
  return {m.reset_blocks, m.total_blocks - m.reset_blocks - m.inactive_blocks, m.inactive_blocks};
}

// Also of one that ended in the last step.
std::string name_of(const VllmEngine& self, RequestId id) {
  for (const auto& [ended, name] : self.log().ended) {
    if (ended == id) return name;
  }
  return self.request(id).spec.name;
}

// ── Tiers ──

void make_engine(VllmEngine* self, const EngineConfig& config, const StepTiming& timing, const TierConfig* tiers,
                 TierRun* run, const std::string& name) {
  if (run != nullptr && tiers == nullptr) throw Error(ErrorKind::ConfigError, "run needs tiers");
  new (self) VllmEngine(config, timing, tiers, run, name);
}

WorkerTiers& tiers_of(VllmEngine& self) {
  if (self.tiers() == nullptr) throw Error(ErrorKind::WrongState, "this engine has no tiers");
  return *self.tiers();
}

std::vector<std::tuple<std::string, int, std::int64_t>> tier_lookup(VllmEngine& self, const Identities& identities) {
  std::vector<std::tuple<std::string, int, std::int64_t>> out;
  constexpr const char* kNames[] = {"miss", "hit", "pending", "retry"};
  for (const TierAnswer& answer : tiers_of(self).lookup(identities.span())) {
    out.emplace_back(kNames[static_cast<std::size_t>(answer.kind)], static_cast<int>(answer.tier), answer.ready_ns);
  }
  return out;
}

// (free, active, inactive, held) of a tier of the worker's own.
std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t> tier_blocks(const VllmEngine& self, Tier tier) {
  const std::size_t pool = self.store().pool_of(tier);
  const PoolMetrics m = self.store().metrics(pool);
  const std::uint64_t held = pool == 0 && self.tiers() != nullptr ? self.tiers()->held() : 0;
  return {m.reset_blocks, m.total_blocks - m.reset_blocks - m.inactive_blocks - held, m.inactive_blocks, held};
}

}  // namespace

void bind_engine(nb::module_& m) {
  nb::class_<Speculation>(m, "Speculation", "What speculative decoding asks of the scheduler, and its acceptance.")
      .def(
          "__init__",
          [](Speculation* self, std::uint32_t tokens, std::uint32_t lookahead, std::uint32_t draft_slots,
             std::uint32_t reserved_slots, bool drops_last_hit, bool pads_admissions, bool pads_hits,
             bool pads_within_context, bool admission_lookahead, std::vector<double> accept_rates, std::uint64_t seed) {
            new (self) Speculation{tokens,
                                   lookahead,
                                   draft_slots,
                                   reserved_slots,
                                   drops_last_hit,
                                   pads_admissions,
                                   pads_hits,
                                   pads_within_context,
                                   admission_lookahead,
                                   std::move(accept_rates),
                                   seed};
          },
          nb::kw_only(), "tokens"_a = 0, "lookahead"_a = 0, "draft_slots"_a = 0, "reserved_slots"_a = 0,
          "drops_last_hit"_a = false, "pads_admissions"_a = true, "pads_hits"_a = true, "pads_within_context"_a = true,
          "admission_lookahead"_a = true, "accept_rates"_a = nb::list(), "seed"_a = 42);

  nb::class_<EngineConfig>(m, "EngineConfig", "Settings of a vLLM-style engine, with vLLM's names.")
      .def("__init__", &make_config, nb::kw_only(), "block_size"_a = 64, "num_gpu_blocks"_a = 16384,
           "max_num_seqs"_a.none() = 256, "max_num_batched_tokens"_a.none() = 8192,
           "max_model_len"_a.none() = nb::none(), "long_prefill_token_threshold"_a = 0,
           "enable_prefix_caching"_a = true, "enable_chunked_prefill"_a = true, "policy"_a = "fcfs",
           "preemption_mode"_a = "lifo", "scheduler_reserve_full_isl"_a = true, "watermark"_a = 0.0,
           "async_scheduling"_a = false, "kv_manager"_a = "native", "eviction_policy"_a.none() = nb::none(),
           "accept_rates"_a = nb::list(), "burst_seed"_a = 42, "speculation"_a = Speculation(),
           "free_order"_a = "unkeyed_first", "phantom_hits"_a = true, "caps_lone_prefill"_a = true,
           "max_num_active_seqs"_a.none() = nb::none(), "long_prefill_token_threshold_adaptive"_a = false,
           "events"_a = false, "kv_trace"_a = false, "check"_a = false, "max_loras"_a.none() = nb::none(),
           "preempted_first"_a = true, "offload"_a.none() = nb::none());

  nb::class_<EventTruth>(m, "EventTruth", "An index that knows only what the consolidated stream tells.")
      .def(nb::init<>())
      .def(
          "apply", [](EventTruth& self, const DrainedEvents& batch) { self.apply(batch.records); }, "batch"_a,
          "InvariantViolated when a row contradicts those before it.")
      .def(
          "require_equal",
          [](EventTruth& self, const VllmEngine& engine) {
            self.require_equal(engine.store(), EventTruth::Scope::Whole);
          },
          "engine"_a, "InvariantViolated unless the engine holds exactly the blocks that the index knows.");

  nb::class_<BurstSampler>(m, "BurstSampler", "Draws how many tokens a step with speculation yields.")
      .def(nb::init<std::vector<double>, std::uint64_t>(), "rates"_a, "seed"_a)
      .def("draw", &BurstSampler::draw, "remaining"_a, "Tokens of one step, at most `remaining`.");

  nb::class_<RequestRecord>(m, "RequestRecord", "What a request leaves. Times are -1 for what never happened.")
      .def_ro("id", &RequestRecord::id)
      .def_ro("name", &RequestRecord::name)
      .def_prop_ro(
          "reason",
          [](const RequestRecord& self) {
            constexpr const char* kNames[] = {"length", "stop", "cancelled"};
            return kNames[static_cast<std::size_t>(self.reason)];
          },
          "length, stop or cancelled.")
      .def_ro("output_tokens", &RequestRecord::output_tokens)
      .def_ro("first_admit_ns", &RequestRecord::first_admit_ns)
      .def_ro("first_token_ns", &RequestRecord::first_token_ns)
      .def_ro("second_token_ns", &RequestRecord::second_token_ns)
      .def_ro("last_token_ns", &RequestRecord::last_token_ns)
      .def_ro("finish_ns", &RequestRecord::finish_ns)
      .def_ro("preemptions", &RequestRecord::preemptions)
      .def_ro("cached_first", &RequestRecord::cached_first)
      .def_ro("cached_total", &RequestRecord::cached_total)
      .def_ro("looked_up", &RequestRecord::looked_up)
      .def_ro("below_first", &RequestRecord::below_first)
      .def_ro("below_total", &RequestRecord::below_total)
      .def_ro("parked_ns", &RequestRecord::parked_ns)
      .def_ro("room_wait_ns", &RequestRecord::room_wait_ns);

  nb::class_<StepEffects>(m, "StepEffects", "What became visible at the end of a step, or of many.")
      .def_prop_ro(
          "tokens",
          [](const StepEffects& self) {
            std::vector<std::pair<RequestId, std::uint32_t>> out;
            for (const NewTokens& fresh : self.tokens) out.emplace_back(fresh.request, fresh.tokens);
            return out;
          },
          "(request, new tokens), in the engine's order.")
      .def_ro("finished", &StepEffects::finished, "Records, in the order in which requests ended.")
      .def_prop_ro(
          "wake_ns",
          [](const StepEffects& self) {
            return self.wake_ns == Engine::kNever ? std::nullopt : std::optional(self.wake_ns);
          },
          "When the next begin_step is due; None until somebody comes.");

  TurnClass<VllmEngine>(m, "Engine", "A vLLM-style engine that is told the time. One call at a time: WrongState.")
      .def("__init__", &make_engine, "config"_a, "timing"_a, nb::kw_only(), "tiers"_a.none() = nb::none(),
           "run"_a.none() = nb::none(), "name"_a = "worker", nb::keep_alive<1, 5>(),
           "With `tiers`, and `run` where several engines share them.")
      .def("submit", &submit, "name"_a, "prompt_tokens"_a, "max_tokens"_a, "identities"_a.none() = nb::none(),
           nb::kw_only(), "priority"_a = 0, "arrival_time"_a = 0.0, "eos_at"_a.none() = nb::none(),
           "accepts"_a.none() = nb::none(), "adapter"_a = 0,
           "Queue a request; returns its index. `identities` name the blocks that prompt and output fill; the "
           "output token with number `eos_at` ends it before `max_tokens` does. `adapter` is of LoRA, 0 for none.")
      .def("never_fits", &VllmEngine::never_fits, "prompt_tokens"_a, "max_tokens"_a,
           "Why a request of this size could never run to its end, or None.")
      .def("cancel", &VllmEngine::cancel, "request"_a, "now_ns"_a,
           "Drop a request: it gets no more tokens, and this is its record. None when it is unknown or has ended.")
      .def("begin_step", &VllmEngine::begin_step, "now_ns"_a, "Schedule a step; returns its duration in ns.")
      .def("end_step", &VllmEngine::end_step, "end_ns"_a, nb::rv_policy::copy, "Make the step's tokens visible.")
      .def("begin_turn", &VllmEngine::begin_turn, "now_ns"_a,
           "Schedule as a recording counts steps; not to be mixed with begin_step.")
      .def("end_turn", &VllmEngine::end_turn, "now_ns"_a, nb::rv_policy::copy,
           "The update that follows: asynchronously that of the batch before.")
      .def("advance", &VllmEngine::advance, "until_ns"_a, "stop_on_finish"_a = false, nb::rv_policy::copy,
           nb::call_guard<nb::gil_scoped_release>(), "Play steps back to back up to `until_ns`.")
      .def("skip_to", &VllmEngine::skip_to, "time_ns"_a, "Let idle time pass.")
      .def_prop_ro("now_ns", &VllmEngine::now_ns, "When the open step ends, or else when the next may begin.")
      .def_prop_ro("in_step", &VllmEngine::in_step)
      .def("set_leaping", &VllmEngine::set_leaping, "on"_a)
      .def_prop_ro("idle", &VllmEngine::idle)
      .def_prop_ro("stuck", &VllmEngine::stuck)
      .def(
          "take_finished",
          [](VllmEngine& self) {
            std::vector<RequestId> ids;
            for (const RequestRecord& record : self.take_effects().finished) ids.push_back(record.id);
            return ids;
          },
          "Requests that finished in the last call of end_step or advance, unless they were taken.")
      .def(
          "emitted", [](const VllmEngine& self, RequestId id) { return self.request(id).outputs(); }, "request"_a,
          "Output tokens of a request that are visible.")
      .def("name", &name_of, "request"_a,
           "The name under which a request was submitted that has not ended, or has in the last step.")
      .def("forward_pass", &VllmEngine::forward_pass, "The open step in numbers; WrongState when none is open.")
      .def_prop_ro("scheduled", &scheduled, "(request, tokens) of the last step, in order.")
      .def_prop_ro("admitted", &admitted, "(request, resumed, cached tokens) of the last step, in order.")
      .def_prop_ro("preempted", [](const VllmEngine& self) { return self.log().preempted; })
      .def_prop_ro("finished", [](const VllmEngine& self) { return self.log().finished; })
      .def_prop_ro("free_after_schedule", [](const VllmEngine& self) { return self.log().free_after_schedule; })
      .def_prop_ro("running", &VllmEngine::running)
      .def_prop_ro("num_waiting", &VllmEngine::num_waiting)
      .def("waiting_head", &VllmEngine::waiting, "count"_a = 4)
      .def_prop_ro(
          "batch",
          [](const VllmEngine& self) {
            std::vector<std::pair<RequestId, std::uint32_t>> out;
            for (const Scheduled& turn : self.batch()) out.emplace_back(turn.id, turn.tokens);
            return out;
          },
          "(request, tokens) of what the open step computes, in order.")
      .def_prop_ro("num_slots", &VllmEngine::num_slots, "As many requests have been here at one time.")
      .def_prop_ro("steps_kept", &VllmEngine::steps_kept, "Ends of steps that a request may still ask for.")
      .def_prop_ro("free_blocks", [](const VllmEngine& self) { return self.store().available(0); })
      .def(
          "free_head", [](const VllmEngine& self, std::size_t count) { return self.store().eviction_order(0, count); },
          "count"_a = 4)
      .def("take_all_events", &VllmEngine::take_all_events,
           "Take all events so far, those of the step in progress too.")
      .def("peek_events", &VllmEngine::peek_events,
           "The events since the last call, those of the step in progress too. They stay to be taken.")
      .def(
          "take_events",
          [](VllmEngine& self) {
            TimedEvents events = self.take_events();
            return nb::make_tuple(std::move(events.batch), to_array(std::move(events.time_ns)));
          },
          "Take the visible events, with the time in ns from which each is: on the device the end of its step, on "
          "tiers "
          "below when it happened.")
      .def(
          "resident_hashes",
          [](const VllmEngine& self) {
            std::vector<std::uint64_t> out;
            for (const BlockIdentity& block : self.store().resident(0)) out.push_back(block.sequence_hash());
            return out;
          },
          "Sequence hashes of the registered blocks, each once.")
      .def(
          "take_kv_trace", [](VllmEngine& self) { return trace_rows(self.take_kv_trace()); },
          "Take (time ns, eviction, blocks, free, active, inactive) of allocations and evictions.")
      .def_prop_ro("pool", &pool_counts, "(free, active, inactive) blocks.")
      .def_prop_ro("steps", [](const VllmEngine& self) { return self.totals().steps; })
      .def_prop_ro("step_ns", [](const VllmEngine& self) { return self.totals().step_ns; })
      .def_prop_ro("uncovered_ns", [](const VllmEngine& self) { return self.totals().uncovered_ns; })
      .def_prop_ro("preemptions", [](const VllmEngine& self) { return self.totals().preemptions; })
      .def_prop_ro("burst_steps", [](const VllmEngine& self) { return self.totals().burst_steps; })
      .def_prop_ro("burst_tokens", [](const VllmEngine& self) { return self.totals().burst_tokens; })
      .def_prop_ro(
          "drafts",
          [](const VllmEngine& self) {
            std::vector<std::pair<RequestId, std::uint32_t>> out;
            for (const Scheduled& turn : self.log().scheduled) {
              if (turn.drafts > 0) out.emplace_back(turn.id, turn.drafts);
            }
            return out;
          },
          "(request, drafts) that the last step verifies, in order.")
      .def_prop_ro("draft_rounds", [](const VllmEngine& self) { return self.totals().draft_rounds; })
      .def_prop_ro("drafted_tokens", [](const VllmEngine& self) { return self.totals().drafted_tokens; })
      .def_prop_ro("accepted_tokens", [](const VllmEngine& self) { return self.totals().accepted_tokens; })
      .def_prop_ro("phantom_hit_blocks", [](const VllmEngine& self) { return self.totals().phantom_hit_blocks; })
      .def_prop_ro("asleep", &VllmEngine::asleep, "Nothing to compute until a transfer lands; no step is open.")
      .def_prop_ro("parked", &VllmEngine::parked, "Requests whose blocks are being loaded.")
      .def_prop_ro(
          "wake_ns", [](VllmEngine& self) { return tiers_of(self).hub().next_wake_ns(); },
          "Not after the next transfer lands; None when none is under way.")
      .def(
          "land", [](VllmEngine& self, std::int64_t now_ns) { tiers_of(self).hub().run_until(now_ns); }, "now_ns"_a,
          nb::call_guard<nb::gil_scoped_release>(), "Let every transfer that ends by then land, each at its time.")
      .def(
          "set_link_share",
          [](VllmEngine& self, std::int64_t now_ns, Tier tier, double share) {
            tiers_of(self).set_link_share(now_ns, tier, share);
          },
          "now_ns"_a, "tier"_a, "share"_a,
          "From now on the links to and from a tier have this share of their bandwidths, 0.001 to 1. A shared tier's "
          "are "
          "everybody's.")
      .def("tier_lookup", &tier_lookup, "identities"_a,
           "(kind, tier, ns) of the leading blocks, ended by the first miss. hit: it is there; pending: it will be at "
           "that time, unless transfers join its links; retry: it is on its way, ask again next step; miss.")
      .def("tier_blocks", &tier_blocks, "tier"_a, "(free, active, inactive, held) of G1 or G2.")
      .def(
          "prefetch",
          [](VllmEngine& self, const Identities& identities, std::int64_t now_ns) {
            return self.prefetch(identities.span(), now_ns);
          },
          "identities"_a, "now_ns"_a, "Load the prefix that tiers below have, before anybody asks for it.")
      .def_prop_ro("loading", &VllmEngine::loading,
                   "Requests that hold blocks which are being loaded, under vLLM's offload.")
      .def_prop_ro("offload_pending", &VllmEngine::offload_pending,
                   "Under vLLM's offload: transfers are under way, or requests have ended that may still store.")
      .def("take_offload_line", &take_offload_line, "What the last turn did about the host, where that is logged.")
      .def_prop_ro("offload_totals", &VllmEngine::offload_totals)
      .def_prop_ro(
          "offload_usage",
          [](const VllmEngine& self) {
            if (self.offload() == nullptr) return std::tuple(0.0, 0.0, 0.0);
            const VllmHost& host = self.offload()->host();
            const auto share = [&](std::uint64_t chunks) {
              return static_cast<double>(chunks) / static_cast<double>(host.capacity());
            };
            return std::tuple(share(host.writing() + host.loading()), share(host.writing()), share(host.loading()));
          },
          "Shares of the host that transfers hold under vLLM's offload: all, being written, being read.")
      .def_prop_ro("tier_totals", [](VllmEngine& self) { return tiers_of(self).totals(); })
      .def(
          "below_tokens",
          [](const VllmEngine& self, RequestId id) {
            const auto& below = self.request(id).record.below_total;
            return std::tuple(below[0], below[1], below[2]);
          },
          "request"_a, "Of its cached tokens, those that came from G2, G3 and G4.")
      .def(
          "tier_waits",
          [](VllmEngine& self, RequestId id) {
            return std::pair(self.request(id).record.parked_ns, self.room_wait_ns(id));
          },
          "request"_a, "Nanoseconds that it was parked for loads, and waited for copies to leave the device.")
      .def("check", &VllmEngine::check);
}

}  // namespace understudy
