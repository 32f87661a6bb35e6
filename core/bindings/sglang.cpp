// SGLang's scheduler in Python, iteration by iteration, for recordings.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "bindings.hpp"
#include "convert.hpp"
#include "engine/sglang/engine.hpp"
#include "engine/sglang/radix_events.hpp"
#include "engine/sglang/scheduler.hpp"
#include "exclusive_class.hpp"
#include "sglang_transport.hpp"

namespace understudy {

void bind_sglang_settings(nb::module_& m);

namespace {

using namespace nb::literals;

// Copies of the host tier take whole steps, as in recordings.
class StepTransfers final : public HostTransfers {
 public:
  StepTransfers(std::int64_t write_steps, std::optional<std::uint64_t> write_tokens_per_step, std::int64_t load_steps)
      : write_steps_(write_steps), write_tokens_per_step_(write_tokens_per_step), load_steps_(load_steps) {}

  void begin_step() noexcept { ++now_; }
  std::int64_t now() const override { return now_; }
  std::int64_t write_ready(std::uint64_t tokens, std::int64_t earliest) override {
    const std::uint64_t more = write_tokens_per_step_ ? tokens / *write_tokens_per_step_ : 0;
    return std::max(now_ + write_steps_ + static_cast<std::int64_t>(more), earliest);
  }
  std::int64_t load_ready(std::uint64_t) override { return now_ + load_steps_; }
  void wait_for_write(std::uint64_t) override {}

 private:
  std::int64_t now_ = -1;
  std::int64_t write_steps_;
  std::optional<std::uint64_t> write_tokens_per_step_;
  std::int64_t load_steps_;
};

// A scheduler with its events, and the batch whose result is outstanding.
class SglangIterations {
 public:
  SglangIterations(const SglangSettings& settings, StepTransfers transfers, StepTransport transport)
      : overlap_(settings.overlap),
        events_(settings.page_size),
        transfers_(transfers),
        transport_(std::move(transport)),
        scheduler_(
            settings, [this](RadixNode& node, bool stored, RadixTier tier) { events_.add(node, stored, tier); },
            &transfers_, &transport_) {}

  SglangScheduler& scheduler() noexcept { return scheduler_; }
  RadixEvents& events() noexcept { return events_; }
  StepTransport& transport() noexcept { return transport_; }

  // Schedules the next batch; null: none.
  const SglangBatch* schedule() {
    transfers_.begin_step();
    scheduler_.set_outstanding(outstanding_.get());
    launched_ = scheduler_.schedule();
    return launched_.get();
  }
  // Processes the result that is due in this iteration: of its batch, or with overlap of the one before.
  // Returns the mode of its batch, "idle", or null.
  const char* process() {
    std::unique_ptr<SglangBatch> due = overlap_ ? std::move(outstanding_) : std::move(launched_);
    if (overlap_) outstanding_ = std::move(launched_);
    scheduler_.set_outstanding(nullptr);
    const bool idle = !due && (!overlap_ || !outstanding_);
    if (due) scheduler_.process(*due);
    scheduler_.end_iteration(idle);
    transport_.end_step();
    if (due) return due->mode == SglangMode::Decode ? "decode" : "prefill";
    return idle && scheduler_.is_idle() ? "idle" : nullptr;
  }

 private:
  bool overlap_;
  RadixEvents events_;
  StepTransfers transfers_;
  StepTransport transport_;
  SglangScheduler scheduler_;
  std::unique_ptr<SglangBatch> launched_;
  std::unique_ptr<SglangBatch> outstanding_;
};

const char* name_of(SglangMode mode) {
  return mode == SglangMode::Extend ? "extend" : mode == SglangMode::Decode ? "decode" : "mixed";
}

nb::list ids_of(const std::vector<SglangRequest*>& requests, std::size_t most) {
  nb::list out;
  for (std::size_t i = 0; i < std::min(most, requests.size()); ++i) out.append(requests[i]->id);
  return out;
}

PyType<"understudy.core_types.SglangStep | None"> describe(const SglangBatch* batch) {
  if (batch == nullptr) return nb::none();
  nb::list rows;
  for (const SglangBatch::Row& row : batch->rows) rows.append(nb::make_tuple(row.request->id, row.tokens, row.decodes));
  return nb::make_tuple(name_of(batch->mode), rows);
}

nb::list describe_nodes(const std::vector<const RadixNode*>& nodes) {
  nb::list out;
  for (const RadixNode* const node : nodes) {
    nb::list one;
    one.append(node->begin);
    one.append(node->length());
    one.append(node->key.at(node->length() - 1));
    out.append(one);
  }
  return out;
}

nb::list describe_leaves(const RadixTree& tree, RadixTier tier) { return describe_nodes(tree.oldest(4, tier)); }

// The pool of window KV or of states.
PyType<"understudy.core_types.SglangComponent | None"> describe_component(SglangIterations& self) {
  const SglangScheduler& scheduler = self.scheduler();
  const RadixComponent* const component = scheduler.component();
  if (component == nullptr) return nb::none();
  nb::dict out;
  out["free"] = component->free();
  out["evictable"] = component->evictable();
  out["protected"] = component->locked();
  out["evict_head"] = describe_nodes(component->oldest(4));
  nb::list begins;
  for (const SglangRequest* const request : scheduler.running()) {
    if (request->has_slot) begins.append(nb::make_tuple(request->id, request->window_begin));
  }
  out["window_begins"] = begins;
  return out;
}

PyType<"understudy.core_types.SglangHost | None"> describe_host(SglangIterations& self) {
  SglangScheduler& scheduler = self.scheduler();
  HostCache* const host = scheduler.host();
  if (host == nullptr) return nb::none();
  std::uint64_t on_both = 0;
  std::uint64_t host_only = 0;
  scheduler.tree().each([&](const RadixNode& node) {
    if (node.host) (node.device ? on_both : host_only) += node.length();
  });
  nb::dict out;
  out["writes"] = nb::cast(host->take_writes());
  out["loads"] = nb::cast(host->take_loads());
  out["host_avail"] = host->avail();
  out["writing"] = host->writing();
  out["loading"] = host->loading();
  out["on_both"] = on_both;
  out["host_only"] = host_only;
  out["host_evict_head"] = describe_leaves(scheduler.tree(), RadixTier::Host);
  return out;
}

PyType<"understudy.core_types.SglangState"> describe_state(SglangIterations& self) {
  SglangScheduler& scheduler = self.scheduler();
  nb::dict out;
  out["running"] = ids_of(scheduler.running(), scheduler.running().size());
  out["batch_is_full"] = scheduler.is_full();
  out["waiting"] = scheduler.waiting().size();
  out["waiting_head"] = ids_of(scheduler.waiting(), 4);
  out["new_token_ratio"] = scheduler.ratio();
  out["avail"] = scheduler.avail();
  out["evictable"] = scheduler.tree().evictable();
  out["protected"] = scheduler.tree().locked();
  out["nodes"] = scheduler.tree().num_nodes();
  out["evict_head"] = describe_leaves(scheduler.tree(), RadixTier::Device);
  return out;
}

// Queues of one side of a disaggregated server, and decisions since the log was taken.
PyType<"understudy.core_types.SglangSide"> take_side(SglangIterations& self) {
  SglangScheduler& scheduler = self.scheduler();
  SglangLog& log = scheduler.log();
  const SglangSide& side = scheduler.side();
  nb::dict out;
  out["sent"] = nb::cast(self.transport().take_sent());
  out["resumed"] = nb::cast(std::exchange(log.resumed, {}));
  nb::list allocated;
  for (const SglangLog::Allocation& one : std::exchange(log.allocated, {})) {
    allocated.append(nb::make_tuple(one.request, one.pages, one.prefix));
  }
  out["allocated"] = allocated;
  out["arrived"] = nb::cast(std::exchange(log.arrived, {}));
  out["joined"] = nb::cast(std::exchange(log.joined, {}));
  const auto all = [](const std::vector<SglangRequest*>& queue) { return ids_of(queue, queue.size()); };
  out["bootstrap"] = all(side.bootstrap);
  out["waiting"] = all(scheduler.waiting());
  out["moving"] = all(side.moving);
  out["held"] = all(side.held);
  out["retracted"] = all(side.retracted);
  out["slots"] = scheduler.free_slots();
  out["buffers"] = side.buffers;
  out["host_tokens"] = side.host_tokens;
  return out;
}

PyType<"understudy.core_types.SglangLog"> take_log(SglangIterations& self) {
  const SglangLog log = std::exchange(self.scheduler().log(), {});
  nb::list admitted;
  for (const SglangLog::Admission& one : log.admitted) {
    admitted.append(nb::make_tuple(one.request, one.resumed, one.cached, one.loaded));
  }
  nb::dict out;
  out["admitted"] = admitted;
  out["retracted"] = nb::cast(log.retracted);
  out["preempted"] = nb::cast(log.preempted);
  out["finished"] = nb::cast(log.finished);
  out["aborted"] = nb::cast(log.aborted);
  out["sampled"] = nb::cast(log.sampled);
  return out;
}

List<PyArg<"understudy.core_types.SglangEvent">> take_events(SglangIterations& self) {
  nb::list out;
  for (const RadixEvent& event : self.events().take()) {
    nb::list runs;
    event.tokens.each(0, event.tokens.size(),
                      [&](TokenSpan run) { runs.append(nb::make_tuple(run.first, run.count)); });
    out.append(nb::make_tuple(event.stored, nb::cast(event.pages), event.parent, event.begin, runs,
                              event.tier == RadixTier::Host));
  }
  return out;
}

}  // namespace

void bind_sglang(nb::module_& m) {
  bind_sglang_settings(m);
  nb::class_<SglangIterations>(m, "SglangIterations", "SGLang's event loop without a clock.")
      .def(
          "__init__",
          [](SglangIterations* self, const SglangSettings& settings, std::int64_t write_steps,
             std::optional<std::uint64_t> write_tokens_per_step, std::int64_t load_steps,
             std::optional<std::int64_t> ack_steps) {
            new (self) SglangIterations(settings, StepTransfers(write_steps, write_tokens_per_step, load_steps),
                                        StepTransport(ack_steps));
          },
          "settings"_a, nb::kw_only(), "write_steps"_a = 1, "write_tokens_per_step"_a.none() = nb::none(),
          "load_steps"_a = 1, "ack_steps"_a.none() = nb::none())
      .def(
          "set_transfer",
          [](SglangIterations& self, RequestId id, std::int64_t handshake_steps, std::int64_t transfer_steps,
             std::optional<std::int64_t> fail_after, std::uint32_t decode_prefix) {
            self.transport().add(id, {handshake_steps, transfer_steps, fail_after, decode_prefix});
          },
          "request"_a, nb::kw_only(), "handshake_steps"_a, "transfer_steps"_a, "fail_after"_a.none() = nb::none(),
          "decode_prefix"_a = 0,
          "Set the link of a request before it is submitted, on one side of a disaggregated server.")
      .def(
          "submit",
          [](SglangIterations& self, RequestId id, const std::vector<std::pair<std::uint64_t, std::uint32_t>>& prompt,
             std::uint32_t max_tokens, std::uint64_t first_output, std::uint32_t eos_at,
             std::optional<std::int64_t> priority) {
            SglangArrival arrival;
            arrival.id = id;
            for (const auto& [first, count] : prompt) arrival.prompt.append({first, count});
            arrival.max_tokens = max_tokens;
            arrival.first_output = first_output;
            arrival.eos_at = eos_at;
            arrival.priority = priority;
            self.scheduler().submit(std::move(arrival));
          },
          "request"_a, "prompt"_a, "max_tokens"_a, "first_output"_a, "eos_at"_a = 0, "priority"_a.none() = nb::none(),
          "Receive a request; `prompt` has runs of consecutive tokens.")
      .def(
          "abort", [](SglangIterations& self, const std::vector<RequestId>& ids) { self.scheduler().abort(ids); },
          "ids"_a)
      .def(
          "schedule", [](SglangIterations& self) { return describe(self.schedule()); },
          "Schedule a batch: (mode, [(id, tokens, decodes)]), or None.")
      .def("process", &SglangIterations::process,
           nb::sig("def process(self) -> typing.Literal['prefill', 'decode', 'idle'] | None"),
           "Process the result that is due; returns prefill, decode, idle or None.")
      .def("check", [](SglangIterations& self) { self.scheduler().check(); })
      .def_prop_ro("avail", [](SglangIterations& self) { return self.scheduler().avail(); })
      .def_prop_ro("chunked",
                   [](SglangIterations& self) -> std::optional<RequestId> {
                     const SglangRequest* const chunked = self.scheduler().chunked();
                     if (chunked == nullptr) return std::nullopt;
                     return chunked->id;
                   })
      .def_prop_ro("empty", [](SglangIterations& self) { return self.scheduler().empty(); })
      .def_prop_ro("free_tokens", [](SglangIterations& self) { return self.scheduler().free_tokens(); })
      .def_prop_ro("component", &describe_component)
      .def_prop_ro("state", &describe_state)
      .def_prop_ro("cached_runs",
                   [](SglangIterations& self) {
                     std::size_t runs = 0;
                     self.scheduler().tree().each([&](const RadixNode& node) { runs += node.key.num_runs(); });
                     return runs;
                   })
      .def("take_host_state", &describe_host, "The host tier and its transfers since the last call, or None.")
      .def("take_side", &take_side, "Queues of a disaggregated server; take it before the log.")
      .def("take_log", &take_log)
      .def("take_events", &take_events);
}

}  // namespace understudy
