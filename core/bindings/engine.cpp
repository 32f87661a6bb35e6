// The engine interface in Python: requests, effects, and the calls of a driver.
#include "engine.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "convert.hpp"
#include "engine/trtllm/live_tokens.hpp"
#include "exclusive_class.hpp"

namespace understudy {

using namespace nb::literals;

std::shared_ptr<Engine> make_engine(const EngineConfig& config, const StepTiming& timing, const TierConfig* tiers,
                                    LiveRun* run, const std::string& name, LiveNet* net, std::uint32_t worker) {
  if (run != nullptr && tiers == nullptr) throw Error(ErrorKind::ConfigError, "run needs tiers");
  std::optional<ExclusiveCall> guard;
  if (run != nullptr) guard.emplace(run->call_flag(), "TierRun");
  std::string what = text_of("num_gpu_blocks: ", config.num_gpu_blocks, " blocks");
  auto blocks = static_cast<double>(config.num_gpu_blocks);
  if (tiers != nullptr) {
    what += text_of(" and ", static_cast<std::uint64_t>(slots_below(*tiers, 1)), " of tiers (g2_blocks, num_blocks)");
    blocks += slots_below(*tiers, 1);
  }
  EngineSite site;
  site.timing = timing;
  site.tiers = tiers;
  site.run = run;
  site.name = name;
  site.reports_batches = true;
  site.net = net == nullptr ? nullptr : &net->net();
  site.pushes = net == nullptr || !config.pushes() ? nullptr : &net->pushes();
  site.worker = worker;
  auto engine = within_memory(what, blocks * kSlotBytes, [&] { return std::shared_ptr<Engine>(config.make(site)); });
  if (run != nullptr) run->keep(engine);
  return engine;
}

namespace {

KvLeg read_leg(const std::string& leg) {
  if (leg == "whole") return KvLeg::Whole;
  if (leg == "prefill") return KvLeg::Prefill;
  if (leg == "decode") return KvLeg::Decode;
  throw Error(ErrorKind::InvalidArgument, "leg: '", leg, "' must be whole, prefill or decode");
}

RequestSpec make_spec(RequestId id, const std::string& name, Int prompt_tokens, Int max_tokens,
                      const Identities* identities, std::optional<std::int64_t> priority, double arrival_time,
                      Int eos_at, const std::optional<std::vector<std::uint32_t>>& accepts, Int adapter,
                      const std::string& leg, std::uint32_t peer, std::optional<RequestId> peer_request, Ints tokens,
                      std::optional<std::uint64_t> salt) {
  RequestSpec spec;
  spec.id = id;
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
  spec.priority = priority.value_or(0);
  spec.has_priority = priority.has_value();
  spec.adapter = static_cast<std::uint32_t>(read_uint(adapter, "adapter", 0xFFFFFFFFu));
  spec.arrival_time = arrival_time;
  spec.leg = read_leg(leg);
  spec.peer = peer;
  spec.peer_request = peer_request.value_or(id);
  if (identities != nullptr) {
    for (std::size_t i = 0; i < identities->size(); ++i) {
      if (const std::uint32_t position = identities->span()[i].position(); position != i) {
        throw Error(ErrorKind::InvalidArgument, "request ", name, ": identities[", i, "] is the block at position ",
                    position, "; give a sequence from its first block on");
      }
    }
    spec.identities = std::make_shared<GivenIdentities>(*identities);
    if (!tokens.is_none()) {
      TokenList list;
      const IntArray<std::uint32_t> values(tokens, "tokens");
      for (const std::uint32_t token : values.span()) list.append({token, 1});
      spec.identities = std::make_shared<LiveTokens>(*identities, std::move(list), salt);
    }
  }
  return spec;
}

constexpr const char* kReasons[] = {"length", "stop", "cancelled", "failed"};

FinishReason read_reason(const std::string& reason) {
  for (std::size_t i = 0; i < std::size(kReasons); ++i) {
    if (reason == kReasons[i]) return static_cast<FinishReason>(i);
  }
  throw Error(ErrorKind::InvalidArgument, "reason: '", reason, "' must be length, stop, cancelled or failed");
}

std::optional<std::int64_t> time_or_none(std::int64_t time_ns) {
  return time_ns == Engine::kNever ? std::nullopt : std::optional(time_ns);
}

}  // namespace

void bind_engine(nb::module_& m) {
  nb::enum_<Phase>(m, "Phase", "State of an engine between two calls.")
      .value("IDLE", Phase::Idle, "Nothing to do until the driver submits something.")
      .value("READY", Phase::Ready, "begin_step is due at wake_ns.")
      .value("IN_STEP", Phase::InStep, "end_step is due at wake_ns, or once the step is computed (Effects.UNKNOWN).")
      .value("ASLEEP", Phase::Asleep, "Waits for transfers.")
      .value("STALLED", Phase::Stalled, "No step makes progress; one that is open still ends at wake_ns.");

  nb::class_<RequestSpec>(m, "RequestSpec", "A request for a simulated engine.")
      .def(nb::new_(&make_spec), "id"_a, "name"_a, "prompt_tokens"_a, "max_tokens"_a,
           "identities"_a.none() = nb::none(), nb::kw_only(), "priority"_a.none() = 0, "arrival_time"_a = 0.0,
           "eos_at"_a.none() = nb::none(), "accepts"_a.none() = nb::none(), "adapter"_a = 0, "leg"_a = "whole",
           "peer"_a = 0, "peer_request"_a.none() = nb::none(), "tokens"_a.none() = nb::none(),
           "salt"_a.none() = nb::none(),
           "`identities` name the blocks that prompt and output fill; the output token with number `eos_at` ends the "
           "request before `max_tokens` does. `adapter` is of LoRA, 0 for none. `leg`: prefill if a peer decodes, "
           "decode if the worker `peer` has the prompt's blocks, under the id `peer_request` (None: the same id). "
           "`tokens` and the number of their `salt`, with identities: for engines that find parts of blocks.");

  nb::class_<RequestRecord>(m, "RequestRecord",
                            "Record of a finished request. Times are -1 for events that never happened.")
      .def(
          "__init__",
          [](RequestRecord* self, RequestId id, const std::string& reason, std::uint32_t output_tokens,
             std::int64_t finish_ns) {
            new (self) RequestRecord;
            self->id = id;
            self->reason = read_reason(reason);
            self->output_tokens = output_tokens;
            self->finish_ns = finish_ns;
          },
          "id"_a, "reason"_a, "output_tokens"_a = 0, "finish_ns"_a = -1)
      .def_ro("id", &RequestRecord::id)
      .def_ro("name", &RequestRecord::name)
      .def_prop_ro(
          "reason", [](const RequestRecord& self) { return kReasons[static_cast<std::size_t>(self.reason)]; },
          "length, stop, cancelled or failed.")
      .def_ro("output_tokens", &RequestRecord::output_tokens)
      .def_ro("queued_ns", &RequestRecord::queued_ns, "When the engine read it: at a boundary between steps.")
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

  nb::class_<AdmittedRequest>(m, "AdmittedRequest", "A request that a step admits.")
      .def(nb::init<RequestId, std::uint32_t>(), "request"_a, "cached_tokens"_a)
      .def_ro("request", &AdmittedRequest::request)
      .def_ro("cached_tokens", &AdmittedRequest::cached_tokens)
      .def_ro("below_tokens", &AdmittedRequest::below_tokens, "Cached tokens that came from G2, G3 and G4.")
      .def_ro("pulled_tokens", &AdmittedRequest::pulled_tokens, "Cached tokens that were read from a prefill worker.");

  nb::class_<Effects> effects(m, "Effects", "Results of a call.");
  effects
      .def(
          "__init__",
          [](Effects* self, Phase phase, std::optional<std::int64_t> wake_ns,
             const std::vector<std::pair<RequestId, std::uint32_t>>& tokens, std::vector<RequestRecord> finished,
             std::vector<AdmittedRequest> admitted, std::uint64_t batch_tokens) {
            new (self) Effects;
            self->phase = phase;
            self->wake_ns = wake_ns.value_or(Effects::kNever);
            for (const auto& [id, count] : tokens) self->tokens.push_back({id, count});
            self->finished = std::move(finished);
            self->admitted = std::move(admitted);
            self->batch_tokens = batch_tokens;
          },
          "phase"_a, "wake_ns"_a.none() = nb::none(), nb::kw_only(), "tokens"_a = nb::list(), "finished"_a = nb::list(),
          "admitted"_a = nb::list(), "batch_tokens"_a = 0)
      .def_prop_ro(
          "tokens",
          [](const Effects& self) {
            std::vector<std::pair<RequestId, std::uint32_t>> out;
            for (const NewTokens& fresh : self.tokens) out.emplace_back(fresh.request, fresh.tokens);
            return out;
          },
          "(request, new tokens), in the engine's order.")
      .def_ro("finished", &Effects::finished, "Records, in the order in which requests ended.")
      .def_ro("admitted", &Effects::admitted, "Requests that the step admits, if the engine reports them.")
      .def_ro("preempted", &Effects::preempted, "Requests that the step preempts, if the engine reports them.")
      .def_ro("batch_tokens", &Effects::batch_tokens, "Tokens that the open step computes; 0 if not reported.")
      .def_ro("phase", &Effects::phase)
      .def_prop_ro(
          "wake_ns", [](const Effects& self) { return time_or_none(self.wake_ns); },
          "When the driver must call next; None until it submits or delivers something.");
  effects.attr("UNKNOWN") = Effects::kUnknown;

  nb::class_<EngineSnapshot>(m, "EngineSnapshot", "The engine at the moment of the call.")
      .def(
          "__init__",
          [](EngineSnapshot* self, Phase phase, std::size_t running, std::size_t waiting, std::size_t loading,
             std::uint64_t active_blocks) {
            new (self) EngineSnapshot;
            self->phase = phase;
            self->running = running;
            self->waiting = waiting;
            self->loading = loading;
            self->active_blocks = active_blocks;
          },
          "phase"_a, nb::kw_only(), "running"_a = 0, "waiting"_a = 0, "loading"_a = 0, "active_blocks"_a = 0)
      .def_ro("phase", &EngineSnapshot::phase)
      .def_ro("running", &EngineSnapshot::running)
      .def_ro("waiting", &EngineSnapshot::waiting, "Requests in the queue.")
      .def_ro("loading", &EngineSnapshot::loading, "Requests whose blocks are loaded from a tier.")
      .def_ro("parked", &EngineSnapshot::parked, "Part of `loading`: those that are not counted as waiting.")
      .def_ro("active_blocks", &EngineSnapshot::active_blocks);

  ExclusiveClass<Engine>(m, "Engine",
                         "A simulated engine of any kind: a state machine that never reads a clock. A second caller at "
                         "a time raises WrongState.")
      .def(
          "submit",
          [](Engine& self, RequestSpec spec, std::int64_t now_ns) { return self.submit(std::move(spec), now_ns); },
          "spec"_a, "now_ns"_a, "Queue a request, whose id is new; this may end another one.")
      .def("cancel", &Engine::cancel, "request"_a, "now_ns"_a,
           "End a request early; its record is among the effects. Unknown or finished ids are ignored.")
      .def("begin_step", &Engine::begin_step, "now_ns"_a, "Schedule a step, which ends at the effects' wake_ns.")
      .def("end_step", &Engine::end_step, "now_ns"_a, "Make the step's results visible.")
      .def("snapshot", &Engine::snapshot)
      .def("never_fits", &Engine::never_fits, "prompt_tokens"_a, "max_tokens"_a,
           "Why a request of this size could never run to its end, or None.")
      .def(
          "advance",
          [](Engine& self, std::int64_t until_ns, bool stop_on_finish) {
            return self.advance(until_ns, {.stop_on_finish = stop_on_finish});
          },
          "until_ns"_a, "stop_on_finish"_a = false, nb::call_guard<nb::gil_scoped_release>(),
          "Run steps back to back up to `until_ns`.")
      .def(
          "next_landing_ns", [](const Engine& self) { return time_or_none(self.next_landing_ns()); },
          "When to call `land` if no step is open; None if the engine waits for no transfer.")
      .def("land", &Engine::land, "now_ns"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Finish every transfer that ends by then, each at its time.")
      .def("finish_transfers", &Engine::finish_transfers, nb::call_guard<nb::gil_scoped_release>(),
           "Let every transfer land; for an engine that has nothing more to do.")
      .def("set_admitting", &Engine::set_admitting, "on"_a,
           "While off, only requests that hold blocks go on; the queue waits.")
      .def_prop_ro("drained", &Engine::drained, "Whether no request holds blocks.")
      .def("forget_cache", &Engine::forget_cache, "now_ns"_a, "Drop every unreferenced block of the device.")
      .def(
          "take_events",
          [](Engine& self) -> TimedRows {
            TimedEvents events = self.take_events();
            return nb::make_tuple(std::move(events.batch), to_array(std::move(events.time_ns)));
          },
          "Take the visible events, with the time in ns from which each is: on the device the end of its step, on "
          "tiers below when it happened.")
      .def(
          "cached_prefix",
          [](const Engine& self, const Identities& identities) { return self.cached_prefix(identities.span()); },
          "identities"_a, "Leading blocks that an admission would find, on the device and below. Reads only.")
      .def("keep_times", &Engine::keep_times,
           "Keep token gaps and load times for RunColumns from now on; memory grows with every step.")
      .def("watch_steps", &Engine::watch_steps, "on"_a, "Prepare what StepTable.record reads, or stop doing so.")
      .def("set_slowdown", &Engine::set_slowdown, "factor"_a,
           "Steps that begin from now on take `factor` times as long; 1 ends that. WrongState for an engine that "
           "cannot.")
      .def("set_load_failures", &Engine::set_load_failures, "tier"_a, "rate"_a,
           "A share `rate` of the loads from a tier fails when they end. WrongState for an engine without tiers.")
      .def(
          "list_cached",
          [](const Engine& self) {
            std::vector<std::pair<Tier, Array<std::uint64_t>>> out;
            const Residency& blocks = self.residency();
            for (std::size_t pool = 0; pool < blocks.num_pools(); ++pool) {
              std::vector<std::uint64_t> hashes;
              for (const BlockIdentity& block : blocks.resident(pool)) hashes.push_back(block.sequence_hash());
              out.emplace_back(blocks.tier(pool), to_array(std::move(hashes)));
            }
            return out;
          },
          "Sequence hashes of the blocks that are cached, by tier; between two steps. Cost: O(blocks).")
      .def("check", &Engine::check);
}

}  // namespace understudy
