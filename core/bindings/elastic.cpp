// Fleets whose workers join and leave, in Python: settings, and what a scaler sees at a tick.
#include "replay/elastic.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "fields.hpp"
#include "replay/faults.hpp"

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

}  // namespace

void bind_elastic(nb::module_& m) {
  bind_faults(m);
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
