// The KV-aware router in Python: its settings in, its decisions out.
#include "router/kv_router.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>

#include "bindings.hpp"
#include "convert.hpp"
#include "engine/vllm/groups/kv_group.hpp"
#include "exclusive_class.hpp"
#include "fields.hpp"

namespace understudy {

namespace {

using namespace nb::literals;

std::int64_t to_ns(double ms, const char* name) {
  const double ns = std::round(ms * 1e6);
  if (!(ns >= 0 && ns < 9.2e18)) throw Error(ErrorKind::ConfigError, name, " must not be negative, got ", ms);
  return static_cast<std::int64_t>(ns);
}

void require_begun(const KvRouter& self) {
  if (self.view() == nullptr) throw Error(ErrorKind::WrongState, "the router has no workers: call begin() first");
}

std::size_t read_worker(const KvRouter& self, Int worker) {
  require_begun(self);
  const std::uint64_t number = read_uint(worker, "worker");
  if (number >= self.load()->requests().size()) {
    throw Error(ErrorKind::InvalidArgument, "there is no worker ", number, " of ", self.load()->requests().size());
  }
  return static_cast<std::size_t>(number);
}

template <typename T, auto Field>
Array<T> column(const KvRouter& self) {
  std::vector<T> out;
  out.reserve(self.decisions().size());
  for (const KvDecision& decision : self.decisions()) out.push_back(static_cast<T>(decision.*Field));
  return to_array(std::move(out));
}

template <typename T, typename Read>
Array<T> candidate_column(const KvRouter& self, Read read) {
  std::vector<T> out;
  out.reserve(self.candidates().size());
  for (const KvCandidate& candidate : self.candidates()) out.push_back(static_cast<T>(read(candidate)));
  return to_array(std::move(out));
}

template <auto Term>
Array<double> candidate_term(const KvRouter& self) {
  return candidate_column<double>(self, [](const KvCandidate& one) { return one.terms.*Term; });
}

}  // namespace

void bind_kv_router(nb::module_& m) {
  nb::class_<KvDecision>(m, "LastDecision", "The values behind a routing decision.")
      .def_ro("row", &KvDecision::row)
      .def_ro("worker", &KvDecision::worker)
      .def_ro("cost", &KvDecision::cost)
      .def_ro("overlap_blocks", &KvDecision::overlap)
      .def_ro("lower_overlap_blocks", &KvDecision::lower_overlap)
      .def_ro("best_overlap_blocks", &KvDecision::best_overlap)
      .def_ro("ties", &KvDecision::ties)
      .def_prop_ro("waited_ms", [](const KvDecision& self) { return static_cast<double>(self.waited_ns) / 1e6; });
  ExclusiveClass<KvRouter, Router> router(m, "KvRouter",
                                          "The native KV-aware router; one caller or run at a time (WrongState).");
  Fields<KvRouterConfig> fields;
  const auto add_ms = [&fields](const char* name, std::int64_t KvRouterConfig::* member) {
    const double usual = static_cast<double>(KvRouterConfig{}.*member) / 1e6;
    fields.add(name, "float", field_default(usual), [name, member](KvRouterConfig& self, nb::handle value) {
      self.*member = to_ns(read_field<double>(value, name, 0), name);
    });
  };
  fields.add("overlap_score_credit", &KvRouterConfig::overlap_score_credit)
      .add("overlap_score_credit_decay", &KvRouterConfig::overlap_score_credit_decay)
      .add("prefill_load_scale", &KvRouterConfig::prefill_load_scale)
      .add("decode_active_request_weight", &KvRouterConfig::decode_active_request_weight)
      .add("host_cache_hit_weight", &KvRouterConfig::host_cache_hit_weight)
      .add("disk_cache_hit_weight", &KvRouterConfig::disk_cache_hit_weight)
      .add("external_cache_hit_weight", &KvRouterConfig::external_cache_hit_weight)
      .add("temperature", &KvRouterConfig::temperature)
      .add("use_events", &KvRouterConfig::use_events);
  add_ms("event_delay_ms", &KvRouterConfig::event_delay_ns);
  add_ms("event_period_ms", &KvRouterConfig::event_period_ns);
  add_ms("predict_ttl_ms", &KvRouterConfig::predict_ttl_ns);
  add_ms("approximate_ttl_ms", &KvRouterConfig::approximate_ttl_ns);
  fields.add("event_loss", &KvRouterConfig::event_loss)
      .add("approximate_blocks", &KvRouterConfig::approximate_blocks)
      .add("queue_threshold", &KvRouterConfig::queue_threshold)
      .add_choice(
          "queue_policy", &KvRouterConfig::queue_order,
          {{"fcfs", RouterQueueOrder::Fcfs}, {"lcfs", RouterQueueOrder::Lcfs}, {"wspt", RouterQueueOrder::Wspt}})
      .add("seed", &KvRouterConfig::seed)
      .add("keep_decisions", &KvRouterConfig::keep_decisions)
      .add("keep_candidates", &KvRouterConfig::keep_candidates)
      .add("imposed", &KvRouterConfig::imposed)
      .add("index_all_groups", &KvRouterConfig::index_all_groups)
      .bind<KvRouter>(router.unguarded());
  router
      .def(
          "begin",
          [](KvRouter& self, Int workers, Int batch_tokens) {
            const std::uint64_t count = read_uint(workers, "workers", 1u << 20);
            const std::uint64_t tokens = read_uint(batch_tokens, "batch_tokens");
            self.begin();
            for (WorkerId id = 0; id < count; ++id) self.add_worker({.id = id, .batch_tokens = tokens});
          },
          "workers"_a, "batch_tokens"_a = 8192, "Reset to `workers` workers; `batch_tokens` fit into a step of each.")
      .def(
          "add_worker",
          [](KvRouter& self, Int batch_tokens, const GroupLayout* groups) {
            require_begun(self);
            const WorkerId id = self.num_workers();
            WorkerInfo worker{.id = id, .batch_tokens = read_uint(batch_tokens, "batch_tokens")};
            if (groups != nullptr) worker.groups = std::make_shared<const GroupLayout>(*groups);
            self.add_worker(worker);
            return id;
          },
          "batch_tokens"_a = 8192, "groups"_a.none() = nb::none(),
          "Add a worker, with the layout of its KV cache groups if it has several; returns its id.")
      .def(
          "set_available",
          [](KvRouter& self, Int worker, bool available) {
            self.set_state(read_worker(self, worker), available ? WorkerState::Ready : WorkerState::Draining);
          },
          "worker"_a, "available"_a, "Set whether the worker may be chosen.")
      .def(
          "forget", [](KvRouter& self, Int worker) { self.forget(read_worker(self, worker)); }, "worker"_a,
          "Drop all knowledge of the worker's cache.")
      .def(
          "set_degraded",
          [](KvRouter& self, Int worker, bool degraded) { self.set_degraded(read_worker(self, worker), degraded); },
          "worker"_a, "degraded"_a,
          "Mark a worker's events as incomplete: blocks of requests sent there also count as cached for "
          "`approximate_ttl_ms`. Unmarking drops those blocks.")
      .def(
          "decide",
          [](KvRouter& self, Int row, Ints hashes, Int prompt_tokens, Int block_size, double now_ms,
             std::int64_t priority, std::int64_t strict_priority) -> std::optional<std::size_t> {
            const IntArray<std::uint64_t> blocks(hashes, "hashes");
            RouteRequest request;
            request.row = read_uint(row, "row");
            request.prompt_tokens = static_cast<std::uint32_t>(read_uint(prompt_tokens, "prompt_tokens", 0xFFFFFFFFu));
            request.block_size = static_cast<std::uint32_t>(read_uint(block_size, "block_size", 1u << 30));
            if (request.block_size == 0 || blocks.span().size() > request.prompt_tokens / request.block_size) {
              throw Error(ErrorKind::InvalidArgument, "hashes name ", blocks.span().size(),
                          " blocks, more full ones than ", request.prompt_tokens, " tokens have");
            }
            request.priority = priority;
            request.strict_priority = strict_priority;
            require_begun(self);
            const std::size_t worker =
                self.choose(request, {blocks.span().begin(), blocks.span().end()}, to_ns(now_ms, "now_ms"));
            if (worker == Router::kLater) return std::nullopt;
            return worker;
          },
          "row"_a, "hashes"_a, "prompt_tokens"_a, "block_size"_a, "now_ms"_a, nb::kw_only(), "priority"_a = 0,
          "strict_priority"_a = 0,
          "Choose the worker of a request, by the sequence hashes of its prompt's full blocks; None: it waits until "
          "`release` returns it.")
      .def(
          "release",
          [](KvRouter& self, double now_ms) -> std::optional<std::pair<std::uint64_t, std::size_t>> {
            require_begun(self);
            const std::optional<Released> next = self.release(to_ns(now_ms, "now_ms"));
            if (!next) return std::nullopt;
            return std::pair(next->row, next->worker);
          },
          "now_ms"_a, "Take the next released row and its worker; None: all others wait. Call until None.")
      .def_prop_ro("waiting", &KvRouter::waiting, "Number of queued requests.")
      .def_prop_ro("last", &KvRouter::last, "The last decision.")
      .def(
          "first_token",
          [](KvRouter& self, Int row) {
            require_begun(self);
            self.first_token(read_uint(row, "row"));
          },
          "row"_a, "Record a request's first token: its prompt does not delay others any more.")
      .def(
          "ended",
          [](KvRouter& self, Int row) {
            require_begun(self);
            self.ended(read_uint(row, "row"));
          },
          "row"_a, "Record that the request has ended.")
      .def_prop_ro(
          "index",
          [](KvRouter& self) {
            require_begun(self);
            return std::shared_ptr<PrefixIndex>(self.shared_view(), &self.shared_view()->index());
          },
          "Index built from received events; worker i has number i. Empty in a replay where the router reads the "
          "workers' blocks instead.")
      .def_prop_ro("rows", &column<std::int64_t, &KvDecision::row>)
      .def_prop_ro("time_ns", &column<std::int64_t, &KvDecision::time_ns>)
      .def_prop_ro("worker", &column<std::int32_t, &KvDecision::worker>)
      .def_prop_ro("cost", &column<double, &KvDecision::cost>)
      .def_prop_ro("overlap_blocks", &column<std::int32_t, &KvDecision::overlap>)
      .def_prop_ro("lower_overlap_blocks", &column<std::int32_t, &KvDecision::lower_overlap>)
      .def_prop_ro("best_overlap_blocks", &column<std::int32_t, &KvDecision::best_overlap>)
      .def_prop_ro("true_overlap_blocks", &column<std::int32_t, &KvDecision::true_overlap>)
      .def_prop_ro("best_true_overlap_blocks", &column<std::int32_t, &KvDecision::best_true_overlap>)
      .def_prop_ro("cost_regret", &column<double, &KvDecision::cost_regret>)
      .def_prop_ro("ties", &column<std::int32_t, &KvDecision::ties>)
      .def_prop_ro("waited_ns", &column<std::int64_t, &KvDecision::waited_ns>)
      .def_prop_ro("candidate_ends", &column<std::int64_t, &KvDecision::end_of_candidates>,
                   "By decision: end of its candidates in the following columns, which have rows if they are kept.")
      .def_prop_ro("candidate_workers",
                   [](const KvRouter& self) {
                     return candidate_column<std::int64_t>(self, [](const KvCandidate& one) { return one.worker; });
                   })
      .def_prop_ro("candidate_prefill", &candidate_term<&KvTerms::prefill>)
      .def_prop_ro("candidate_active", &candidate_term<&KvTerms::active>)
      .def_prop_ro("candidate_added", &candidate_term<&KvTerms::added>)
      .def_prop_ro("candidate_requests", &candidate_term<&KvTerms::requests>)
      .def_prop_ro("candidate_credit", &candidate_term<&KvTerms::credit>)
      .def_prop_ro("candidate_overlap_blocks",
                   [](const KvRouter& self) {
                     return candidate_column<std::int64_t>(self, [](const KvCandidate& one) { return one.overlap; });
                   })
      .def_prop_ro("candidate_lower_overlap_blocks",
                   [](const KvRouter& self) {
                     return candidate_column<std::int64_t>(self,
                                                           [](const KvCandidate& one) { return one.lower_overlap; });
                   })
      .def_prop_ro(
          "costs", [](const KvRouter& self) { return to_array(std::vector<double>(self.costs())); },
          "Cost of each worker in the last decision; infinite for unavailable workers.")
      .def_prop_ro(
          "prefill_tokens",
          [](const KvRouter& self) {
            require_begun(self);
            const auto tokens = self.load()->prefill_tokens();
            return to_array(std::vector<std::int64_t>(tokens.begin(), tokens.end()));
          },
          "By worker: uncached prompt tokens of dispatched requests without a first token.")
      .def_prop_ro(
          "active_blocks",
          [](const KvRouter& self) {
            require_begun(self);
            std::vector<std::int64_t> out;
            for (std::size_t worker = 0; worker < self.load()->requests().size(); ++worker) {
              out.push_back(static_cast<std::int64_t>(self.load()->blocks(worker)));
            }
            return to_array(std::move(out));
          },
          "By worker: distinct prompt blocks of its live requests.")
      .def_prop_ro("lost_deliveries",
                   [](const KvRouter& self) { return self.view() == nullptr ? 0 : self.view()->lost(); })
      .def_prop_ro("unknown_removals",
                   [](const KvRouter& self) { return self.view() == nullptr ? 0 : self.view()->unknown_removals(); });
}

}  // namespace understudy
