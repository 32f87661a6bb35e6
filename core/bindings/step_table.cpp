// The recorder of steps.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include "base/exclusive_call.hpp"
#include "bindings.hpp"
#include "convert.hpp"
#include "replay/step_table.hpp"

namespace understudy {

namespace {

using namespace nb::literals;

ColumnsByName take(StepTable& self) {
  StepTable::Columns all = self.take();
  nb::dict out;
  const auto put = [&out](const char* name, auto& column) { out[name] = to_array(std::move(column)); };
  put("step_worker", all.worker);
  put("step_begin_ns", all.begin_ns);
  put("step_end_ns", all.end_ns);
  put("step_compute_ns", all.compute_ns);
  put("step_decodes_ns", all.decodes_ns);
  put("step_batch", all.batch);
  put("step_running", all.running);
  put("step_waiting", all.waiting);
  put("step_active_blocks", all.active_blocks);
  put("step_stop", all.stop);
  put("step_head", all.head);
  put("entry_batch", all.entry_batch);
  put("entry_request", all.entry_request);
  put("entry_tokens", all.entry_tokens);
  put("entry_before", all.entry_before);
  put("entry_decodes", all.entry_decodes);
  put("entry_own_ns", all.entry_own_ns);
  put("loading_step", all.loading_step);
  put("loading_request", all.loading_request);
  put("event_ns", all.event_ns);
  put("event_worker", all.event_worker);
  put("event_kind", all.event_kind);
  put("event_request", all.event_request);
  put("event_other", all.event_other);
  put("event_cached", all.event_cached);
  return out;
}

}  // namespace

void bind_step_table(nb::module_& m) {
  nb::class_<StepTable>(m, "StepTable", "Records every step of a run: its batch and the decisions of its schedule.")
      .def(nb::init<>())
      .def(
          "place",
          [](StepTable& self, Int request, Int worker, std::int64_t now_ns) {
            self.place(read_uint(request, "request"), read_uint(worker, "worker", 0x7FFFFFFFu), now_ns);
          },
          "request"_a, "worker"_a, "now_ns"_a, "Record that a request was sent to a worker.")
      .def(
          "record",
          [](StepTable& self, Int worker, Engine& engine, bool ended, std::int64_t now_ns) {
            const ExclusiveCall guard(engine.call_flag(), "Engine");
            self.record(read_uint(worker, "worker", 0x7FFFFFFFu), engine, ended, now_ns);
          },
          "worker"_a, "engine"_a, "ended"_a, "now_ns"_a, "Record a step that has begun, or ended.")
      .def(
          "split", [](StepTable& self, Int worker) { self.split(read_uint(worker, "worker", 0x7FFFFFFFu)); },
          "worker"_a, "Begin a new batch with the next step, because requests of the worker have ended.")
      .def_prop_ro("num_steps", &StepTable::num_steps)
      .def("take", &take, "Take the columns by name, once.");
}

}  // namespace understudy
