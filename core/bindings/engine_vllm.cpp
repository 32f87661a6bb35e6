// The vLLM engine in Python: what its decisions, blocks and drafts are, in addition to the interface.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <string>

#include "engine/vllm/lockstep.hpp"
#include "engine/vllm/view.hpp"

#include "bindings.hpp"
#include "convert.hpp"
#include "engine.hpp"
#include "exclusive_class.hpp"

namespace understudy {

void bind_engine_groups(ExclusiveClass<VllmEngine, Engine>& engine);   // groups.cpp
void bind_engine_tiers(ExclusiveClass<VllmEngine, Engine>& engine);    // engine_tiers.cpp
void bind_engine_handoff(ExclusiveClass<VllmEngine, Engine>& engine);  // handoff.cpp

namespace {

using namespace nb::literals;

std::vector<std::pair<RequestId, std::uint32_t>> scheduled(const VllmEngine& self) {
  std::vector<std::pair<RequestId, std::uint32_t>> out;
  for (const Scheduled& turn : VllmView(self).log().scheduled) out.emplace_back(turn.id, turn.tokens);
  return out;
}

std::vector<std::tuple<RequestId, bool, std::uint32_t>> admitted(const VllmEngine& self) {
  std::vector<std::tuple<RequestId, bool, std::uint32_t>> out;
  const StepLog& log = VllmView(self).log();
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

using Stay = std::tuple<std::int64_t, std::int64_t, std::vector<std::int64_t>>;

std::vector<Stay> take_stays(VllmEngine& self) {
  std::vector<Stay> out;
  for (const BlockStay& r : VllmParts(self).take_stays()) {
    out.emplace_back(r.lifetime_ns, r.idle_ns,
                     std::vector(r.gaps_ns.begin(), r.gaps_ns.begin() + static_cast<std::ptrdiff_t>(r.gaps)));
  }
  return out;
}

// A call of the view without arguments.
template <auto Call>
auto seen() {
  return [](const VllmEngine& self) { return (VllmView(self).*Call)(); };
}

std::map<std::string, std::uint64_t> stepped(const VllmEngine& self) {
  std::map<std::string, std::uint64_t> out;
  const auto counts = VllmView(self).stepped();
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] > 0) out[kStepReasons[i]] = counts[i];
  }
  return out;
}

std::tuple<std::uint64_t, std::uint64_t, std::uint64_t> pool_counts(const VllmEngine& self) {
  const PoolMetrics m = VllmView(self).device();
  return {m.reset_blocks, m.total_blocks - m.reset_blocks - m.inactive_blocks, m.inactive_blocks};
}

// Also of one that ended in the last step.
std::string name_of(const VllmEngine& self, RequestId id) {
  for (const auto& [ended, name] : VllmView(self).log().ended) {
    if (ended == id) return name;
  }
  return self.request(id).spec.name;
}

constexpr const char* kSubmit =
    "def submit(self, name: str, prompt_tokens: int, max_tokens: int, identities: Identities | None = None, *, "
    "priority: int = 0, arrival_time: float = 0.0, eos_at: int | None = None, "
    "accepts: collections.abc.Sequence[int] | None = None, adapter: int = 0) -> int";

// The engine chooses the id; other arguments are those of RequestSpec.
RequestId submit(VllmEngine& self, const nb::args& args, const nb::kwargs& kwargs) {
  const RequestId id = VllmView(self).num_submitted();
  (void)self.submit(nb::cast<RequestSpec>(nb::type<RequestSpec>()(id, *args, **kwargs)), VllmView(self).now_ns());
  return id;
}

std::shared_ptr<VllmEngine> make_vllm(const VllmConfig& config, const StepTiming& timing, const TierConfig* tiers,
                                      LiveRun* run, const std::string& name) {
  return std::static_pointer_cast<VllmEngine>(make_engine(config, timing, tiers, run, name));
}

}  // namespace

void bind_vllm_engine(nb::module_& m) {
  nb::class_<EventTruth>(m, "EventTruth", "An index built only from the consolidated event stream.")
      .def(nb::init<>())
      .def(
          "apply", [](EventTruth& self, const DrainedEvents& batch) { self.apply(batch.records); }, "batch"_a,
          "InvariantViolated when a row contradicts those before it.")
      .def(
          "require_equal",
          [](EventTruth& self, VllmEngine& engine) {
            const ExclusiveCall guard(engine.call_flag(), "Engine");
            self.require_equal(engine.residency(), EventTruth::Scope::Whole);
          },
          "engine"_a, "InvariantViolated unless the engine holds exactly the blocks that the index knows.");

  nb::class_<BurstSampler>(m, "BurstSampler", "Draws how many tokens a step with speculation yields.")
      .def(nb::init<std::vector<double>, std::uint64_t>(), "rates"_a, "seed"_a)
      .def("draw", &BurstSampler::draw, "remaining"_a, "Tokens of one step, at most `remaining`.");

  ExclusiveClass<VllmEngine, Engine> engine(
      m, "VllmEngine", "An engine with vLLM's scheduler. A second caller at a time raises WrongState.");
  engine
      .def_new(&make_vllm, "config"_a, "timing"_a, nb::kw_only(), "tiers"_a.none() = nb::none(),
               "run"_a.none() = nb::none(), "name"_a = "worker", nb::keep_alive<0, 5>(),
               "With `tiers`, and `run` where several engines share them.")
      .def(
          "submit",
          [](VllmEngine& self, RequestSpec spec, std::int64_t now_ns) { return self.submit(std::move(spec), now_ns); },
          "spec"_a, "now_ns"_a, "Queue a request, as any engine does.")
      .def("submit", &submit, nb::sig(kSubmit),
           "Queue a request with the arguments of RequestSpec but for its id, which is returned.")
      .def(
          "begin_recorded_step", [](VllmEngine& self, std::int64_t now_ns) { VllmLockstep(self).begin_step(now_ns); },
          "now_ns"_a, "Schedule as a recording counts steps; not to be mixed with begin_step.")
      .def("end_recorded_step", &VllmEngine::end_step, "now_ns"_a,
           "The update that follows: asynchronously that of the batch before.")
      .def("skip_to", &VllmEngine::skip_to, "time_ns"_a, "Let idle time pass.")
      .def_prop_ro("now_ns", seen<&VllmView::now_ns>(), "When the open step ends, or else when the next may begin.")
      .def_prop_ro("in_step", &VllmEngine::in_step)
      .def(
          "set_fast_forward", [](VllmEngine& self, bool on) { VllmParts(self).set_fast_forward(on); }, "on"_a)
      .def_prop_ro("idle", &VllmEngine::idle)
      .def_prop_ro("stuck", seen<&VllmView::stuck>())
      .def(
          "take_finished",
          [](VllmEngine& self) {
            std::vector<RequestId> ids;
            for (const RequestRecord& record : VllmParts(self).take_effects().finished) ids.push_back(record.id);
            return ids;
          },
          "Requests that finished in the last call of end_step or advance, unless they were taken.")
      .def(
          "emitted", [](const VllmEngine& self, RequestId id) { return self.request(id).outputs(); }, "request"_a,
          "Output tokens of a request that are visible.")
      .def("name", &name_of, "request"_a,
           "The name under which a request was submitted that has not ended, or has in the last step.")
      .def_prop_ro("scheduled", &scheduled, "(request, tokens) of the last step, in order.")
      .def_prop_ro("admitted", &admitted, "(request, resumed, cached tokens) of the last step, in order.")
      .def_prop_ro("preempted", [](const VllmEngine& self) { return VllmView(self).log().preempted; })
      .def_prop_ro("finished", [](const VllmEngine& self) { return VllmView(self).log().finished; })
      .def_prop_ro("free_after_schedule",
                   [](const VllmEngine& self) { return VllmView(self).log().free_after_schedule; })
      .def_prop_ro("running", seen<&VllmView::running>())
      .def_prop_ro("num_waiting", seen<&VllmView::num_waiting>())
      .def(
          "waiting_head", [](const VllmEngine& self, std::size_t count) { return VllmView(self).waiting(count); },
          "count"_a = 4)
      .def_prop_ro(
          "batch",
          [](const VllmEngine& self) {
            std::vector<std::pair<RequestId, std::uint32_t>> out;
            for (const Scheduled& turn : VllmView(self).batch()) out.emplace_back(turn.id, turn.tokens);
            return out;
          },
          "(request, tokens) of the open step's batch, in order.")
      .def_prop_ro("num_slots", seen<&VllmView::num_slots>(), "Most requests present at one time.")
      .def_prop_ro("steps_kept", seen<&VllmView::steps_kept>(), "Number of step ends kept for present requests.")
      .def_prop_ro("free_blocks",
                   [](const VllmEngine& self) {
                     const PoolMetrics pool = VllmView(self).device();
                     return pool.reset_blocks + pool.inactive_blocks;
                   })
      .def(
          "free_head", [](const VllmEngine& self, std::size_t count) { return VllmView(self).free_head(count); },
          "count"_a = 4)
      .def(
          "take_all_events", [](VllmEngine& self) { return VllmParts(self).take_all_events(); },
          "Take all events so far, those of the step in progress too; with `check`, that step misses them at its end.")
      .def(
          "peek_events", [](VllmEngine& self) { return VllmParts(self).peek_events(); },
          "Return the events since the last call, the step in progress included, without taking them.")
      .def(
          "resident_hashes", [](const VllmEngine& self) { return VllmView(self).cached_names(); },
          "Sequence hashes of the registered blocks, each once.")
      .def(
          "take_kv_trace", [](VllmEngine& self) { return trace_rows(self.take_kv_trace()); },
          "Take (time ns, eviction, blocks, free, active, inactive) of allocations and evictions.")
      .def("take_stays", &take_stays,
           "Take (lifetime ns, idle ns, gaps ns) of the sampled blocks that went to another owner.")
      .def_prop_ro("pool", &pool_counts, "(free, active, inactive) blocks.")
      .def_prop_ro("steps", [](const VllmEngine& self) { return VllmView(self).totals().steps; })
      .def_prop_ro("step_ns", [](const VllmEngine& self) { return VllmView(self).totals().step_ns; })
      .def_prop_ro("uncovered_ns", [](const VllmEngine& self) { return VllmView(self).totals().uncovered_ns; })
      .def_prop_ro("preemptions", [](const VllmEngine& self) { return VllmView(self).totals().preemptions; })
      .def_prop_ro("burst_steps", [](const VllmEngine& self) { return VllmView(self).totals().burst_steps; })
      .def_prop_ro("burst_tokens", [](const VllmEngine& self) { return VllmView(self).totals().burst_tokens; })
      .def_prop_ro(
          "drafts",
          [](const VllmEngine& self) {
            std::vector<std::pair<RequestId, std::uint32_t>> out;
            for (const Scheduled& turn : VllmView(self).log().scheduled) {
              if (turn.drafts > 0) out.emplace_back(turn.id, turn.drafts);
            }
            return out;
          },
          "(request, drafts) that the last step verifies, in order.")
      .def_prop_ro("draft_rounds", [](const VllmEngine& self) { return VllmView(self).totals().draft_rounds; })
      .def_prop_ro("drafted_tokens", [](const VllmEngine& self) { return VllmView(self).totals().drafted_tokens; })
      .def_prop_ro("accepted_tokens", [](const VllmEngine& self) { return VllmView(self).totals().accepted_tokens; })
      .def_prop_ro("accepted_at", seen<&VllmView::accepted_at>(), "Accepted drafts by their place in the round.")
      .def_prop_ro(
          "expired_leases", [](const VllmEngine& self) { return VllmView(self).totals().expired_leases; },
          "Leases that ended before a peer read the blocks.")
      .def_prop_ro("phantom_hit_blocks",
                   [](const VllmEngine& self) { return VllmView(self).totals().phantom_hit_blocks; })
      .def_prop_ro(
          "operations", [](const VllmEngine& self) { return VllmView(self).operations(); },
          "Index probes and policy steps so far, for tests of growth.")
      .def_prop_ro("stepped", &stepped,
                   "Steps of advance that were simulated by themselves and not fast-forwarded, by their reason.");
  bind_engine_tiers(engine);
  bind_engine_groups(engine);
  bind_engine_handoff(engine);
}

}  // namespace understudy
