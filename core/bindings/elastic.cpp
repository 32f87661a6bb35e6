// Fleets whose workers join and leave, in Python: settings, and what a scaler sees at a tick.
#include "replay/elastic.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "bindings.hpp"
#include "engine/engine.hpp"
#include "fields.hpp"
#include "replay/event_faults.hpp"
#include "replay/faults.hpp"
#include "replay/step_meter.hpp"

namespace understudy {

void bind_elastic(nb::module_& m);  // replay.cpp

namespace {

void bind_faults(nb::module_& m) {
  nb::class_<Fault> fault(m, "Fault", "Something that fails during a run, for a time.");
  Fields<Fault>()
      .add_choice("kind", &Fault::kind,
                  {{"kill", FaultKind::Crash},
                   {"slow", FaultKind::SlowWorker},
                   {"slow_link", FaultKind::SlowLink},
                   {"lose_events", FaultKind::LoseEvents},
                   {"late_events", FaultKind::LateEvents},
                   {"double_events", FaultKind::DuplicateEvents},
                   {"stop_events", FaultKind::EventGap},
                   {"restart_router", FaultKind::RouterRestart},
                   {"fail_loads", FaultKind::LoadErrors}})
      .add("time_ns", &Fault::time_ns)
      .add("worker", &Fault::worker)
      .add("duration_ns", &Fault::duration_ns)
      .add("factor", &Fault::factor)
      .add("rate", &Fault::rate)
      .add("delay_ns", &Fault::delay_ns)
      .add("tier", &Fault::tier)
      .bind(fault);
  nb::class_<LostRequests> lost(m, "LostRequests",
                                "What becomes of requests whose worker crashes, or drains too long.");
  Fields<LostRequests>()
      .add_choice("survival", &LostRequests::survival,
                  {{"fail", Survival::Fail}, {"retry", Survival::Retry}, {"migrate", Survival::Migrate}})
      .add("delay_ns", &LostRequests::delay_ns)
      .add("most_attempts", &LostRequests::most_attempts, 1u << 20)
      .add("drain_ns", &LostRequests::drain_ns)
      .bind(lost);
}

using namespace nb::literals;

void require_worker(const EventFaults& faults, std::size_t worker) {
  if (worker >= faults.num_workers()) {
    throw Error(ErrorKind::InvalidArgument, "worker: there is no ", worker, "; there are ", faults.num_workers());
  }
}

DrainedEvents as_batch(EventRecords rows) {
  DrainedEvents batch;
  batch.records = std::move(rows);
  return batch;
}

void bind_event_faults(nb::module_& m) {
  nb::class_<EventFaults>(m, "EventFaults", "Faults on the way of KV events from workers to a router.")
      .def(
          "__init__",
          [](EventFaults* self, const std::vector<Fault>& faults, std::uint64_t seed) {
            new (self) EventFaults(faults, seed);
          },
          "faults"_a, "seed"_a = 0)
      .def("add_worker", &EventFaults::add_worker, "Add a worker; they are numbered from 0.")
      .def(
          "deliver",
          [](EventFaults& self, std::size_t worker, std::int64_t now_ns, const DrainedEvents* batch) {
            require_worker(self, worker);
            TimedEvents events;
            if (batch != nullptr) {
              events.batch.records = batch->records;
              events.time_ns.assign(batch->records.size(), now_ns);
            }
            self.pass(worker, now_ns, events);
            return std::move(events.batch);
          },
          "worker"_a, "now_ns"_a, "batch"_a.none() = nb::none(),
          "Take events that a worker publishes now, if any, and return those that the router receives now.")
      .def(
          "next_due_ns",
          [](const EventFaults& self, std::size_t worker) {
            require_worker(self, worker);
            return self.next_due_ns(worker);
          },
          "worker"_a, "When the next events that were held back are due; None: none are.")
      .def(
          "reread",
          [](EventFaults& self, std::size_t worker) {
            require_worker(self, worker);
            return as_batch(self.reread(worker));
          },
          "worker"_a, "Return rows after which the router knows all that the worker has published.")
      .def(
          "forget",
          [](EventFaults& self, std::size_t worker) {
            require_worker(self, worker);
            return as_batch(self.forget(worker));
          },
          "worker"_a, "Return rows after which the router knows nothing of the worker.")
      .def(
          "end",
          [](EventFaults& self, std::size_t worker) {
            require_worker(self, worker);
            return as_batch(self.end(worker));
          },
          "worker"_a, "The worker has lost its cache, and what was under way. Returns the same rows as `forget`.")
      .def(
          "is_complete",
          [](const EventFaults& self, std::size_t worker) {
            require_worker(self, worker);
            return self.is_complete(worker);
          },
          "worker"_a, "Whether the router has received all that the worker has published.");
}

}  // namespace

void bind_elastic(nb::module_& m) {
  bind_faults(m);
  bind_event_faults(m);
  nb::enum_<LifeState>(m, "LifeState", nb::is_arithmetic(), "State of a worker in a run.")
      .value("STARTING", LifeState::Starting)
      .value("READY", LifeState::Ready)
      .value("DRAINING", LifeState::Draining)
      .value("STOPPED", LifeState::Stopped)
      .value("CRASHED", LifeState::Crashed)
      .value("RESTARTING", LifeState::Restarting);
  nb::class_<LengthSum>(m, "LengthSum", "Lengths of some requests.")
      .def_ro("count", &LengthSum::count)
      .def_ro("tokens", &LengthSum::tokens)
      .def_prop_ro("variance", &LengthSum::variance);
  nb::class_<WorkerMetrics>(m, "WorkerMetrics", "A worker at a tick: its open step, and its queue behind that.")
      .def_ro("worker", &WorkerMetrics::worker)
      .def_ro("pool", &WorkerMetrics::pool)
      .def_ro("state", &WorkerMetrics::state)
      .def_ro("has_stepped", &WorkerMetrics::has_stepped)
      .def_ro("step_ns", &WorkerMetrics::step_ns, "Duration of the open step; 0: none, or unknown.")
      .def_ro("prefill", &WorkerMetrics::prefill, "Prompt tokens that the step computes.")
      .def_ro("prefill_context_tokens", &WorkerMetrics::prefill_context_tokens, "Computed before of these prompts.")
      .def_ro("decode", &WorkerMetrics::decode, "Contexts of the requests that decode.")
      .def_ro("queued_prefill", &WorkerMetrics::queued_prefill, "Prompts that wait.")
      .def_ro("queued_decode", &WorkerMetrics::queued_decode,
              "Contexts of requests that wait after their first token.");
  m.def(
      "measure_worker",
      [](Engine& engine, WorkerId worker, std::uint32_t pool, LifeState state,
         const std::vector<std::tuple<RequestId, std::uint64_t, bool>>& sent) {
        std::vector<SentRequest> requests;
        requests.reserve(sent.size());
        for (const auto& [id, length, has_tokens] : sent) requests.push_back({id, length, has_tokens});
        WorkerMetrics out;
        out.worker = worker;
        out.pool = pool;
        out.state = state;
        StepMeter().measure(engine, requests, out);
        return out;
      },
      "engine"_a, "worker"_a, "pool"_a, "state"_a, "sent"_a,
      "Measure a worker as a scaler sees it. `sent`: its requests in the order of submission, as (id, tokens of prompt "
      "and output so far, whether it has any output).");
  nb::class_<TrafficWindow>(m, "TrafficWindow", "Requests since the last tick.")
      .def_ro("since_ns", &TrafficWindow::since_ns)
      .def_ro("arrived", &TrafficWindow::arrived)
      .def_ro("completed", &TrafficWindow::completed)
      .def_ro("prompt_tokens", &TrafficWindow::prompt_tokens, "Sum over those that completed, as are all that follow.")
      .def_ro("output_tokens", &TrafficWindow::output_tokens)
      .def_ro("hit_share", &TrafficWindow::hit_share, "Sum of the cached shares of their prompts.")
      .def_ro("with_tokens", &TrafficWindow::with_tokens)
      .def_ro("ttft_ns", &TrafficWindow::ttft_ns)
      .def_ro("with_gaps", &TrafficWindow::with_gaps)
      .def_ro("itl_ns", &TrafficWindow::itl_ns, "Sum of their mean gaps between tokens.");
  nb::class_<FleetMetrics>(m, "FleetMetrics", "A fleet as its scaler sees it.")
      .def_ro("now_ns", &FleetMetrics::now_ns)
      .def_ro("workers", &FleetMetrics::workers, "Workers that have not stopped, by id.")
      .def_ro("traffic", &FleetMetrics::traffic);
  nb::class_<Elastic> elastic(m, "Elastic", "When a scaler is first called, and how long workers of each pool start.");
  Fields<Elastic>()
      .add("start_ns", &Elastic::start_ns)
      .required()
      .add("first_tick_ns", &Elastic::first_tick_ns)
      .bind(elastic);
}

}  // namespace understudy
