// A run of a fleet in Python: columns in, columns out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>
#include <type_traits>
#include <unordered_map>

#include "base/exclusive_call.hpp"
#include "base/kept_mappings.hpp"
#include "bindings.hpp"
#include "convert.hpp"
#include "engine/engine.hpp"
#include "fields.hpp"
#include "prefix_actions.hpp"
#include "replay/fleet.hpp"
#include "replay/plain_rows.hpp"
#include "replay/trace_identities.hpp"
#include "router.hpp"
#include "workload.hpp"

namespace understudy {

void bind_disaggregation(nb::module_& m);  // disaggregation.cpp
void bind_elastic(nb::module_& m);         // elastic.cpp
void bind_sessions(nb::module_& m);        // sessions.cpp

namespace {

using namespace nb::literals;

constexpr std::uint64_t kMostNs = std::uint64_t{1} << 62;

// Settings with the seed of the router.
struct SeededFleet : FleetConfig {
  std::uint64_t seed = 0;
};

// Engines lent to a callback. They are invalid when the run is over, even if Python keeps a handle.
class LentEngines {
 public:
  LentEngines() = default;
  LentEngines(const LentEngines&) = delete;
  LentEngines& operator=(const LentEngines&) = delete;
  ~LentEngines() {
    for (auto& [engine, handle] : handles_) nb::inst_set_state(handle, false, false);
  }

  nb::object handle_of(Engine& engine) {
    nb::object& handle = handles_[&engine];
    if (!handle.is_valid()) handle = nb::cast(&engine, nb::rv_policy::reference);  // as its own class
    return handle;
  }

 private:
  std::unordered_map<Engine*, nb::object> handles_;
};

SessionOrder read_session_order(const nb::object& answer) {
  std::pair<std::vector<std::string>, std::optional<std::int64_t>> read;
  if (!nb::try_cast(answer, read)) {
    throw Error(ErrorKind::PolicyError,
                "the session policy must return a list of actions and the time (ns) after which it is asked again, or "
                "None; got ",
                nb::repr(answer).c_str());
  }
  SessionOrder order;
  order.again_ns = read.second;
  for (const std::string& name : read.first) order.actions.push_back(read_prefix_action(name));
  return order;
}

ScaleOrder read_order(const nb::object& answer) {
  std::pair<std::vector<std::optional<std::uint32_t>>, std::optional<std::int64_t>> read;
  if (!nb::try_cast(answer, read)) {
    throw Error(ErrorKind::PolicyError, "the scaler must return numbers of workers and the time of the next tick; got ",
                nb::repr(answer).c_str());
  }
  return {std::move(read.first), read.second};
}

FleetResult run_fleet(PyArg<"object"> workload, FleetConfig settings, const std::vector<std::string>& names,
                      PyType<"collections.abc.Callable[[int], None]"> progress,
                      PyType<"collections.abc.Callable[[int, VllmEngine, bool], None]"> on_step,
                      PyType<"collections.abc.Callable[[FleetMetrics], tuple[list[int | None], int | None]]"> on_tick,
                      PyType<"collections.abc.Callable[[SessionSleep], tuple[list[str], int | None]]"> on_sleep) {
  ColumnReader reader(workload);
  WorkloadColumns columns = read_workload(reader, workload);
  if (!names.empty() && names.size() != columns.size()) {
    throw Error(ErrorKind::InvalidArgument, "names has ", names.size(), " rows, expected ", columns.size());
  }
  columns.names = names;
  LentEngines lent;
  if (!on_step.is_none()) {
    settings.on_step = [&on_step, &lent](std::size_t worker, Engine& stepped, bool ended) {
      nb::gil_scoped_acquire gil;
      on_step(worker, lent.handle_of(stepped), ended);
    };
  }
  if (settings.elastic) {
    settings.elastic->on_tick = [&on_tick](const FleetMetrics& metrics) {
      nb::gil_scoped_acquire gil;
      return read_order(on_tick(metrics));
    };
  }
  if (!on_sleep.is_none()) {
    settings.session_policy = [&on_sleep](const SessionSleep& sleep) {
      nb::gil_scoped_acquire gil;
      return read_session_order(on_sleep(nb::cast(sleep, nb::rv_policy::copy)));
    };
  }
  const Fleet::Progress report = [&progress](std::size_t ended) {
    nb::gil_scoped_acquire gil;
    if (!progress.is_none()) progress(ended);
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  };
  const std::shared_ptr<Router> router = settings.router;
  const ExclusiveCall guard(router->call_flag(), "the router");
  std::shared_ptr<Router> decode_router;
  std::optional<ExclusiveCall> decode_guard;
  if (settings.disaggregation && settings.disaggregation->decode_router != router) {
    decode_router = settings.disaggregation->decode_router;
    decode_guard.emplace(decode_router->call_flag(), "the router of decode workers");
  }
  double workers = 0;
  double blocks = 0;
  for (const WorkerPool& pool : settings.pools) {
    workers += pool.num_workers;
    blocks += static_cast<double>(pool.num_workers) * static_cast<double>(pool.engine->num_gpu_blocks);
    if (pool.tiers) blocks += slots_below(*pool.tiers, pool.num_workers);
  }
  const std::string what = text_of("num_gpu_blocks, tiers: ", static_cast<std::uint64_t>(blocks), " blocks of ",
                                   static_cast<std::uint64_t>(workers), " workers");
  nb::gil_scoped_release release;
  return within_memory(what, blocks * kSlotBytes, [&] {
    std::optional<KeptMappings> kept;
    if (settings.threads <= 1) kept.emplace();  // else each thread has its own
    Fleet fleet(std::move(settings), columns);
    return fleet.run(report);
  });
}

PyType<"understudy.core_types.PlainRows | None"> plain_rows(nb::bytes lines) {
  std::optional<PlainRows> rows;
  {
    const std::string_view text(lines.c_str(), lines.size());
    nb::gil_scoped_release release;
    rows = read_plain_rows(text);
  }
  if (!rows) return nb::none();
  return nb::make_tuple(to_array(std::move(rows->timestamp_ms)), to_array(std::move(rows->input_length)),
                        to_array(std::move(rows->output_length)), to_array(std::move(rows->hash_counts)),
                        to_array(std::move(rows->hash_ids)));
}

Identities trace_identities(Column<std::uint32_t> stream, Int trace_block_size, Int stream_tokens,
                            Column<std::uint32_t> outputs, Int block_size, Int row, Int count, Int adapter) {
  const auto block = static_cast<std::uint32_t>(read_uint(trace_block_size, "trace_block_size", 1u << 30));
  const std::uint64_t tokens = read_uint(stream_tokens, "stream_tokens", std::uint64_t{1} << 40);
  const auto size = static_cast<std::uint32_t>(read_uint(block_size, "block_size", BlockStore::kMaxBlockSize));
  if (block == 0 || size == 0) throw Error(ErrorKind::InvalidArgument, "block sizes must be at least 1");
  if (stream.size() * std::uint64_t{block} < tokens) {
    throw Error(ErrorKind::InvalidArgument, "stream names ", stream.size(), " blocks of ", block,
                " tokens, fewer than ", tokens, " tokens");
  }
  const std::uint64_t blocks = read_uint(count, "count", std::uint64_t{1} << 32);
  const TraceIdentities source({stream.data(), stream.size()}, block, tokens, {outputs.data(), outputs.size()},
                               blocks * size, size, read_uint(row, "row"),
                               static_cast<std::uint32_t>(read_uint(adapter, "adapter", 0xFFFFFFFFu)));
  std::vector<BlockIdentity> out;
  source.extend(out, static_cast<std::size_t>(blocks));
  return Identities(std::move(out));
}

template <typename T, typename Allocator>
Array<T> to_numpy(const std::vector<T, Allocator>& column) {
  return to_array(column);
}

template <typename T>
Arrays<T, T, T> to_numpy(const std::array<std::vector<T>, 3>& parts) {
  return nb::make_tuple(to_array(parts[0]), to_array(parts[1]), to_array(parts[2]));
}

template <typename T>
Array<std::make_signed_t<T>> sample_column(const FleetResult& self, T EngineSample::* member) {
  std::vector<std::make_signed_t<T>> out;
  out.reserve(self.samples.size());
  for (const EngineSample& sample : self.samples) out.push_back(static_cast<std::make_signed_t<T>>(sample.*member));
  return to_array(std::move(out));
}

// A property for every column and total that the core declares (replay/fleet_result.hpp).
void bind_columns(nb::class_<FleetResult>& result) {
  const auto of_records = [&](const auto& column) {
    result.def_prop_ro(column.name, [kept = column.kept](const FleetResult& self) { return to_numpy(self.*kept); });
  };
  for_each_line(kRecordColumns, of_records);
  for_each_line(kTierRecordColumns, of_records);
  for_each_line(kOtherColumns, [&](const auto& column) {
    result.def_prop_ro(column.name,
                       [member = column.member](const FleetResult& self) { return to_numpy(self.*member); });
  });
  for_each_line(kSampleColumns, [&](const auto& column) {
    result.def_prop_ro(column.name,
                       [member = column.member](const FleetResult& self) { return sample_column(self, member); });
  });
  for_each_line(kTotals, [&](const auto& total) {
    result.def_prop_ro(total.name, [member = total.member](const FleetResult& self) { return self.totals.*member; });
  });
  result.def_prop_ro("late_notifications", [](const FleetResult& self) { return self.handoff.late_notifications; });
}

}  // namespace

void bind_replay(nb::module_& m) {
  nb::enum_<EventClass>(m, "EventClass", nb::is_arithmetic(), "The order of events at one time.")
      .value("LANDING", EventClass::Landing, "Transfers end.")
      .value("STEP_END", EventClass::StepEnd, "A step ends.")
      .value("DELIVERY", EventClass::Delivery, "KV events reach the router.")
      .value("ARRIVAL", EventClass::Arrival, "A request arrives, or is cancelled.")
      .value("ABORT", EventClass::Abort, "The client of a replayed request aborts it.")
      .value("FAULT", EventClass::Fault, "Something fails, or recovers.")
      .value("HAND_BACK", EventClass::HandBack, "A worker has drained for too long.")
      .value("TICK", EventClass::Tick, "A scaler reads the fleet and orders workers.")
      .value("READY", EventClass::Ready, "A worker has started.")
      .value("SESSION", EventClass::Session, "A policy decides on the KV of a session that sleeps.")
      .value("BEGIN", EventClass::Begin, "Workers that are free begin a step, with all that arrived before.");

  nb::class_<GroupReport>(m, "GroupReport", "Hits and blocks of a worker with several KV cache groups.")
      .def_ro("admissions", &GroupReport::admissions)
      .def_ro("shortened", &GroupReport::shortened, "Admissions whose hit another group made shorter.")
      .def_ro("queries", &GroupReport::queries, "Tokens looked up.")
      .def_ro("hits", &GroupReport::hits, "Tokens found in all groups.")
      .def_prop_ro(
          "full_hits",
          [](const GroupReport& self) { return self.has_full ? std::optional(self.full_hits) : std::nullopt; },
          "Tokens that full attention alone had; None when no group is full attention.")
      .def_prop_ro(
          "samples",
          [](const GroupReport& self) {
            std::vector<std::pair<std::int64_t, std::vector<std::uint64_t>>> out;
            for (const GroupReport::Sample& sample : self.samples) out.emplace_back(sample.time_ns, sample.held);
            return out;
          },
          "(time in ns, distinct blocks that requests hold by group), in order of time.")
      .def_ro("peaks", &GroupReport::peaks, "Most distinct blocks that requests hold at one time, by group.");
  nb::class_<TierSummary>(m, "TierSummary", "One tier of a pool at the end of a run, summed over its workers.")
      .def_ro("tier", &TierSummary::tier)
      .def_ro("pool", &TierSummary::pool, "Pool name; empty in a run of one pool.")
      .def_ro("first_worker", &TierSummary::first_worker, "First worker of the pool.")
      .def_ro("capacity_blocks", &TierSummary::capacity_blocks)
      .def_ro("resident_blocks", &TierSummary::resident_blocks)
      .def_ro("stored_blocks", &TierSummary::stored_blocks)
      .def_ro("evicted_blocks", &TierSummary::evicted_blocks)
      .def_prop_ro(
          "residency",
          [](const TierSummary& self) -> Arrays<std::int64_t, std::int64_t> {
            std::vector<std::int64_t> time_ns;
            std::vector<std::int64_t> blocks;
            for (const SharedTier::Residency& sample : self.residency) {
              time_ns.push_back(sample.time_ns);
              blocks.push_back(static_cast<std::int64_t>(sample.blocks));
            }
            return nb::make_tuple(to_array(std::move(time_ns)), to_array(std::move(blocks)));
          },
          "(time in ns, blocks) of a tier that workers share; else empty.")
      .def_ro("events", &TierSummary::events, "Events of a shared tier, if kept; else empty.");
  bind_disaggregation(m);
  bind_elastic(m);
  bind_sessions(m);
  nb::class_<FleetResult> result(m, "FleetResult", "Columns of a run, one row a request in workload order.");
  bind_columns(result);
  result.def_ro("rejections", &FleetResult::rejections)
      .def(
          "events",
          [](const FleetResult& self, std::size_t worker) -> const EventTable& { return self.events.at(worker); },
          nb::rv_policy::reference_internal, "worker"_a, "Events of a worker, published at the ends of its steps.")
      .def(
          "kv_trace",
          [](const FleetResult& self, std::size_t worker) {
            std::vector<std::tuple<std::int64_t, bool, std::size_t, std::uint64_t, std::uint64_t, std::uint64_t>> out;
            for (const auto& [time_ns, r] : self.kv_trace.at(worker)) {
              out.emplace_back(time_ns, r.eviction, r.blocks, r.free, r.active, r.inactive);
            }
            return out;
          },
          "worker"_a, "A worker's allocations and evictions, in the format of Engine.take_kv_trace.")
      .def_ro("tiers", &FleetResult::tiers)
      .def_ro("groups", &FleetResult::groups, "By worker; empty: all have one KV cache group.")
      .def_ro("tier_totals", &FleetResult::tier_totals)
      .def_ro("links", &FleetResult::links)
      .def_ro("handoff", &FleetResult::handoff)
      .def_ro("evictions", &FleetResult::evictions)
      .def_ro("prefixes", &FleetResult::prefixes, "KV of sleeping sessions, summed over workers.")
      .def_ro("play_begin_ns", &FleetResult::play_begin_ns,
              "When the lanes began, after the preparation; -1: no lanes.")
      .def_ro("idle_lanes", &FleetResult::idle_lanes,
              "Lanes for which no play was left before the end of the duration.")
      .def_ro("stored_blocks", &FleetResult::stored_blocks);

  nb::class_<WorkerPool> pool(m, "Pool", "Workers that are alike.");
  Fields<WorkerPool>()
      .add("engine", "EngineConfig", "",
           [](WorkerPool& self, nb::handle engine) {
             self.engine = read_field<std::shared_ptr<EngineConfig>>(engine, "engine", 0)->clone();
           })
      .add("timing", &WorkerPool::timing)
      .add("workers", &WorkerPool::num_workers)
      .add("tiers", &WorkerPool::tiers)
      .add("name", &WorkerPool::name)
      .add_choice("role", &WorkerPool::role,
                  {{"both", WorkerRole::Both}, {"prefill", WorkerRole::Prefill}, {"decode", WorkerRole::Decode}})
      .bind(pool);

  m.def("read_plain_rows", &plain_rows, "lines"_a,
        "Timestamps (ms), input and output lengths, numbers of hash ids and the ids of lines that are all plain rows, "
        "else None.");

  nb::class_<Checkpoints>(m, "Checkpoints",
                          "States at the ends of fast-forwards: a run with fast-forward records them, a run without "
                          "compares its own (InvariantViolated).")
      .def(nb::init<>())
      .def_prop_ro("recorded", &Checkpoints::recorded)
      .def_prop_ro("compared", &Checkpoints::compared);
  nb::class_<FleetConfig> settings(m, "FleetSettings", "How a fleet of simulated workers plays a workload.");
  Fields<SeededFleet>()
      .add("pools", &FleetConfig::pools)
      .required()
      .add("seed", &SeededFleet::seed)
      .add("routing", kRoutingType, "",
           [](SeededFleet& self, nb::handle routing) { self.router = read_router(routing, self.seed); })
      .add("concurrency", &FleetConfig::concurrency)
      .add("threads", &FleetConfig::threads, 4096)
      .add("fast_forward", &FleetConfig::fast_forward)
      .add("check", &FleetConfig::check)
      .add("lockstep_ns", &FleetConfig::lockstep_ns, kMostNs)
      .add("turnaround_ns", &FleetConfig::turnaround_ns, kMostNs)
      .add_object("play_limits", &FleetConfig::play_limits)
      .add("ranks", &FleetConfig::ranks, 1u << 20)
      .add("checkpoints", &FleetConfig::checkpoints)
      .add("steps", &FleetConfig::steps)
      .add("disaggregation", &FleetConfig::disaggregation)
      .add("elastic", &FleetConfig::elastic)
      .add("faults", &FleetConfig::faults)
      .add_object("lost", &FleetConfig::lost)
      .add("fault_seed", &FleetConfig::fault_seed)
      .bind<FleetConfig>(settings);
  m.def("run_fleet", &run_fleet, "workload"_a, "settings"_a, nb::kw_only(), "names"_a = nb::list(),
        "progress"_a.none() = nb::none(), "on_step"_a.none() = nb::none(), "on_tick"_a.none() = nb::none(),
        "on_sleep"_a.none() = nb::none(),
        "Replay a workload (its columns, by name) through a fleet; `names` are those of its requests, if any matter.");
  m.def("give_back_memory", &KeptMappings::give_back, nb::call_guard<nb::gil_scoped_release>(),
        "Return memory cached by finished runs to the system; False when there was none.");
  m.def("trace_identities", &trace_identities, "stream"_a, "trace_block_size"_a, "stream_tokens"_a, "outputs"_a,
        "block_size"_a, "row"_a, "count"_a, "adapter"_a = 0,
        "Identities of the first `count` blocks of a trace row, as a fleet sees them.");
}

}  // namespace understudy
