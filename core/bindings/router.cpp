// Routers in Python: the requests and views that they receive, and their notifications.
#include "router.hpp"

#include <algorithm>
#include <functional>
#include <numeric>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bindings.hpp"
#include "convert.hpp"
#include "exclusive_class.hpp"
#include "router/kv_router.hpp"
#include "router/recorded_router.hpp"

namespace understudy {

namespace {

using namespace nb::literals;

// The fleet as seen by a router of Python's, which may keep the object longer than it holds.
class ViewHandle {
 public:
  explicit ViewHandle(FleetView& view) : view_(&view) {}
  void close() noexcept { view_ = nullptr; }
  FleetView& operator*() const {
    if (view_ == nullptr) throw Error(ErrorKind::WrongState, "a view of the fleet is good for one call of choose()");
    return *view_;
  }
  FleetView* operator->() const { return &**this; }

 private:
  FleetView* view_;
};

struct ClosesView {
  ViewHandle& view;
  ~ClosesView() { view.close(); }
};

struct AskedRequest {
  RouteRequest request;
  Identities prompt_blocks;
};

template <typename T, typename Read>
Array<T> by_worker(const ViewHandle& self, Read read) {
  std::vector<T> out;
  for (WorkerId worker = 0; worker < self->loads().size(); ++worker) out.push_back(static_cast<T>(read(worker)));
  return to_array(std::move(out));
}

template <auto Field>
Array<std::int64_t> loads_of(const ViewHandle& self) {
  return by_worker<std::int64_t>(self, [&](WorkerId worker) { return self->loads()[worker].*Field; });
}

template <auto Field>
Array<std::int64_t> counts_of(const ViewHandle& self) {
  return by_worker<std::int64_t>(self, [&](WorkerId worker) { return self->counts(worker).*Field; });
}

PyType<"tuple[str, ...]"> by_name(const ViewHandle& self, auto name_of) {
  nb::list out;
  for (WorkerId worker = 0; worker < self->loads().size(); ++worker) out.append(name_of(worker));
  return nb::tuple(out);
}

const char* name_of(RequestStage stage) {
  return stage == RequestStage::Whole ? "whole" : stage == RequestStage::Prefill ? "prefill" : "decode";
}

const char* name_of(WorkerRole role) {
  return role == WorkerRole::Both ? "both" : role == WorkerRole::Prefill ? "prefill" : "decode";
}

const char* name_of(WorkerState state) {
  switch (state) {
    case WorkerState::Starting:
      return "starting";
    case WorkerState::Ready:
      return "ready";
    case WorkerState::Draining:
      return "draining";
    case WorkerState::Gone:
      break;
  }
  return "gone";
}

// Whether a router overrides a method; the methods of the base class are marked `does_nothing`.
bool has_own(nb::handle router, const char* method) {
  return nb::hasattr(router, method) && !nb::hasattr(router.attr(method), "does_nothing");
}

// Calls an object's choose(request, view) and, where defined, notifies observe(batch), first_token(row) and ended(row).
class PythonRouter final : public Router {
 public:
  explicit PythonRouter(nb::handle router)
      : router_(nb::borrow(router)),
        observes_(has_own(router, "observe")),
        hears_first_tokens_(has_own(router, "first_token")),
        hears_ends_(has_own(router, "ended")) {}
  ~PythonRouter() override {
    if (Py_IsInitialized() == 0) {
      router_.release();
      return;
    }
    nb::gil_scoped_acquire gil;
    router_.reset();
  }

  WorkerId choose(const RouteRequest& request, FleetView& view) override {
    nb::gil_scoped_acquire gil;
    std::vector<BlockIdentity> blocks;
    if (request.identities != nullptr) request.identities->extend(blocks, request.prompt_tokens / request.block_size);
    const nb::object asked = nb::cast(AskedRequest{request, Identities(std::move(blocks))});
    nb::inst_ptr<AskedRequest>(asked)->request.identities = nullptr;  // invalid after this call
    const nb::object seen = nb::cast(ViewHandle(view));
    const ClosesView closes{*nb::inst_ptr<ViewHandle>(seen)};  // also where the router raises
    const nb::object answer = router_.attr("choose")(asked, seen);
    std::int64_t worker = -1;
    if (!nb::try_cast(answer, worker) || worker < 0) {
      throw Error(ErrorKind::PolicyError,
                  "the router's choose() must return the id of a worker, out of view.ready; got ",
                  nb::repr(answer).c_str());
    }
    return static_cast<WorkerId>(worker);
  }

  bool asks_workers() const noexcept override { return true; }
  bool observes() const noexcept override { return observes_; }
  void observe(const KvDelivery& delivery) override {
    nb::gil_scoped_acquire gil;
    router_.attr("observe")(nb::cast(delivery));
  }
  bool tracks() const noexcept override { return hears_first_tokens_ || hears_ends_; }
  void first_token(std::uint64_t row) override {
    if (hears_first_tokens_) tell("first_token", row);
  }
  void ended(std::uint64_t row) override {
    if (hears_ends_) tell("ended", row);
  }

 private:
  void tell(const char* method, std::uint64_t row) {
    nb::gil_scoped_acquire gil;
    router_.attr(method)(row);
  }

  nb::object router_;
  bool observes_;
  bool hears_first_tokens_;
  bool hears_ends_;
};

// A fleet driven elsewhere, of which only the dispatched requests are known.
class CountedFleet final : public FleetView {
 public:
  CountedFleet(std::vector<WorkerLoad> loads, std::vector<WorkerId> ready)
      : loads_(std::move(loads)), ready_(std::move(ready)) {}
  std::int64_t now_ns() const override { return 0; }
  std::span<const WorkerId> ready() const override { return ready_; }
  std::span<const WorkerLoad> loads() const override { return loads_; }
  const WorkerInfo& info(WorkerId) const override { return info_; }
  WorkerState state(WorkerId worker) const override {
    return std::ranges::binary_search(ready_, worker) ? WorkerState::Ready : WorkerState::Draining;
  }
  WorkerCounts counts(WorkerId) override { return {}; }

 private:
  std::vector<WorkerLoad> loads_;
  std::vector<WorkerId> ready_;
  WorkerInfo info_;
};

WorkerId pick(Router& self, Int row, Int session, Ints outstanding_requests, Ints outstanding_tokens, Ints ready,
              std::optional<std::uint64_t> parent_session) {
  if (dynamic_cast<KvRouter*>(&self) != nullptr) {
    throw Error(ErrorKind::WrongState, "a KV-aware router needs more than loads: decide()");
  }
  if (dynamic_cast<RecordedRouter*>(&self) != nullptr) {
    throw Error(ErrorKind::WrongState, "a recorded router needs the workers of a run; pass it as routing");
  }
  const IntArray<std::uint64_t> requests(outstanding_requests, "outstanding_requests");
  const IntArray<std::uint64_t> tokens(outstanding_tokens, "outstanding_tokens");
  if (requests.span().empty() || requests.span().size() != tokens.span().size()) {
    throw Error(ErrorKind::InvalidArgument,
                "outstanding_requests and outstanding_tokens need a number for each worker");
  }
  std::vector<WorkerLoad> loads;
  for (WorkerId worker = 0; worker < tokens.span().size(); ++worker) {
    loads.push_back({requests.span()[worker], tokens.span()[worker]});
  }
  std::vector<WorkerId> ids(loads.size());
  std::iota(ids.begin(), ids.end(), WorkerId{0});
  if (!ready.is_none()) {
    const IntArray<std::uint64_t> given(ready, "ready");
    ids.assign(given.span().begin(), given.span().end());
    if (ids.empty() || ids.back() >= loads.size() ||
        std::ranges::adjacent_find(ids, std::greater_equal<>()) != ids.end()) {
      throw Error(ErrorKind::InvalidArgument, "ready must have ids of workers, at least one, ascending");
    }
  }
  RouteRequest request;
  request.row = read_uint(row, "row");
  request.session = read_uint(session, "session");
  request.parent_session = parent_session.value_or(RouteRequest::kNoSession);
  request.block_size = 1;
  CountedFleet fleet(std::move(loads), std::move(ids));
  return self.choose(request, fleet);
}

}  // namespace

std::shared_ptr<Router> read_router(nb::handle router, std::uint64_t seed) {
  if (nb::isinstance<nb::str>(router)) {
    const std::string name = nb::cast<std::string>(router);
    if (auto known = make_router(name, seed)) return known;
    throw Error(ErrorKind::ConfigError,
                "routing must be round_robin, random, least_loaded, power_of_two, session_affinity, session_tree, kv ",
                "or a Router; got '", name, "'");
  }
  std::shared_ptr<Router> native;
  if (nb::try_cast(router, native) && native) return native;
  if (!nb::hasattr(router, "choose")) {
    throw Error(
        ErrorKind::ConfigError,
        "routing must be round_robin, random, least_loaded, power_of_two, session_affinity, session_tree, kv or a ",
        "Router with choose(request, view); got ", nb::repr(router).c_str());
  }
  return std::make_shared<PythonRouter>(router);
}

void bind_router(nb::module_& m) {
  ExclusiveClass<Router>(m, "NativeRouter", "A router of the core's; one caller or run at a time (WrongState).")
      .def("pick", &pick, "row"_a, "session"_a, "outstanding_requests"_a, "outstanding_tokens"_a,
           "ready"_a.none() = nb::none(), "parent_session"_a = nb::none(),
           "Choose one of the `ready` workers (default: any) by the loads dispatched and not ended, which are by id: "
           "for fleets that run elsewhere.");
  bind_recorded_router(m);
  m.def(
      "native_router", [](const std::string& name, Int seed) { return make_router(name, read_uint(seed, "seed")); },
      "name"_a, "seed"_a, nb::sig("def native_router(name: str, seed: int) -> NativeRouter | None"),
      "Make a router by name; None: no router of that name (or it needs more than loads).");
  nb::class_<AskedRequest>(m, "RouteRequest", "A request as a router sees it.")
      .def_prop_ro(
          "row", [](const AskedRequest& self) { return self.request.row; }, "Row of the workload.")
      .def_prop_ro(
          "session", [](const AskedRequest& self) { return self.request.session; },
          "Session; requests of one session have the same number.")
      .def_prop_ro(
          "parent_session",
          [](const AskedRequest& self) -> std::optional<std::uint64_t> {
            if (self.request.parent_session == RouteRequest::kNoSession) return std::nullopt;
            return self.request.parent_session;
          },
          "Session that started this one, or None.")
      .def_prop_ro(
          "stage", [](const AskedRequest& self) { return name_of(self.request.stage); },
          "Part of the request that needs a worker: whole, prefill or decode.")
      .def_prop_ro("arrival_ns", [](const AskedRequest& self) { return self.request.arrival_ns; })
      .def_prop_ro("prompt_tokens", [](const AskedRequest& self) { return self.request.prompt_tokens; })
      .def_prop_ro(
          "output_tokens", [](const AskedRequest& self) { return self.request.output_tokens; },
          "Requested output tokens.")
      .def_prop_ro("priority", [](const AskedRequest& self) { return self.request.priority; })
      .def_prop_ro(
          "block_size", [](const AskedRequest& self) { return self.request.block_size; },
          "Block size of the first pool.")
      .def_prop_ro(
          "prompt_blocks", [](const AskedRequest& self) { return self.prompt_blocks; },
          "Identities of the prompt's full blocks; empty without prefix caching.");
  nb::class_<ViewHandle>(m, "FleetView", "The fleet as its router sees it, for one call of choose().")
      .def_prop_ro("now_ns", [](const ViewHandle& self) { return self->now_ns(); })
      .def(
          "__len__", [](const ViewHandle& self) { return self->loads().size(); },
          "Number of ids assigned so far, those of workers that have left included.")
      .def_prop_ro(
          "ready",
          [](const ViewHandle& self) {
            return to_array(std::vector<std::int64_t>(self->ready().begin(), self->ready().end()));
          },
          "Ids of the workers that may be chosen for this request, ascending.")
      .def_prop_ro(
          "roles",
          [](const ViewHandle& self) {
            return by_name(self, [&](WorkerId worker) { return name_of(self->info(worker).role); });
          },
          "By worker: both, prefill or decode.")
      .def_prop_ro(
          "states",
          [](const ViewHandle& self) {
            return by_name(self, [&](WorkerId worker) { return name_of(self->state(worker)); });
          },
          "By worker: starting, ready, draining or gone.")
      .def_prop_ro("outstanding_requests", &loads_of<&WorkerLoad::outstanding_requests>,
                   "By worker: requests dispatched and not ended.")
      .def_prop_ro("outstanding_tokens", &loads_of<&WorkerLoad::outstanding_tokens>,
                   "By worker: prompt and requested output tokens of those.")
      .def_prop_ro(
          "pools",
          [](const ViewHandle& self) {
            return by_worker<std::int64_t>(self, [&](WorkerId worker) { return self->info(worker).pool; });
          },
          "By worker: pool number.")
      .def_prop_ro("running", &counts_of<&WorkerCounts::running>, "By worker: requests that have been admitted.")
      .def_prop_ro("waiting", &counts_of<&WorkerCounts::waiting>, "By worker: requests that have not.")
      .def_prop_ro("used_blocks", &counts_of<&WorkerCounts::used_blocks>, "By worker: referenced blocks.")
      .def_prop_ro("total_blocks", &counts_of<&WorkerCounts::total_blocks>);
  nb::class_<KvDelivery>(m, "KvEventBatch", "Block changes of one step of a worker, or of a shared tier.")
      .def(
          "__init__",
          [](KvDelivery* self, Int worker, DrainedEvents events, Int pool, std::int64_t time_ns) {
            new (self) KvDelivery{static_cast<WorkerId>(read_uint(worker, "worker")),
                                  static_cast<std::uint32_t>(read_uint(pool, "pool", 0xFFFFFFFFu)), time_ns,
                                  std::move(events)};
          },
          "worker"_a, "events"_a, nb::kw_only(), "pool"_a = 0, "time_ns"_a = 0,
          "Build the batch of a worker; a replay, a live fleet and a router pass these to `observe`.")
      .def_prop_ro(
          "worker",
          [](const KvDelivery& self) {
            return self.worker == KvDelivery::kShared ? std::nullopt : std::optional(self.worker);
          },
          "None: a tier that the workers of a pool share.")
      .def_ro("pool", &KvDelivery::pool, "Number of the worker's pool, or of the pool that owns the tier.")
      .def_ro("time_ns", &KvDelivery::time_ns, "When the events became visible at their source.")
      .def_ro("events", &KvDelivery::events);
}

}  // namespace understudy
