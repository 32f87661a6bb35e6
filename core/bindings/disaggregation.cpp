// Prefill and decode pools in Python: rules, links, and columns of the requests.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "convert.hpp"
#include "fields.hpp"
#include "live_net.hpp"
#include "replay/disaggregation.hpp"
#include "replay/handoff_columns.hpp"
#include "router.hpp"

namespace understudy {

void bind_disaggregation(nb::module_& m);
void bind_push_net(nb::module_& m);

namespace {

using namespace nb::literals;

// A decider of Python's: an object with remote(prompt_tokens, cached_tokens, session).
class UserDecider final : public Decider {
 public:
  explicit UserDecider(nb::object user) : user_(std::move(user)) {}
  UserDecider(const UserDecider&) = delete;
  UserDecider& operator=(const UserDecider&) = delete;
  ~UserDecider() override {
    const nb::gil_scoped_acquire gil;
    user_.reset();
  }
  bool remote(const RouteRequest& request, std::uint32_t cached_tokens) override {
    const nb::gil_scoped_acquire gil;
    const nb::object answer = user_.attr("remote")(request.prompt_tokens, cached_tokens, request.session);
    if (nb::isinstance<nb::bool_>(answer)) return nb::cast<bool>(answer);
    throw Error(ErrorKind::PolicyError, "remote() must return True or False");
  }

 private:
  nb::object user_;
};

std::shared_ptr<Decider> make_rule(std::uint32_t prompt_tokens, std::uint32_t uncached_tokens, double uncached_share,
                                   bool either) {
  auto rule = std::make_shared<UncachedRule>();
  rule->prompt_tokens = prompt_tokens;
  rule->uncached_tokens = uncached_tokens;
  rule->uncached_share = uncached_share;
  rule->either = either;
  return rule;
}

using Read = std::tuple<std::uint32_t, std::uint32_t, std::uint64_t, std::int64_t, std::int64_t, bool>;

std::vector<Read> take_ended(LiveNet& self) {
  std::vector<Read> out;
  for (const HandOffRecord& record : self.net().take_ended()) {
    out.emplace_back(record.from, record.to, record.bytes, record.posted_ns, record.landed_ns, record.failed);
  }
  return out;
}

std::size_t in_flight(LiveNet& self, std::uint32_t worker) {
  return static_cast<std::size_t>(std::ranges::count_if(self.net().records(), [worker](const HandOffRecord& record) {
    return record.landed_ns == HandOffNet::kNever && (record.from == worker || record.to == worker);
  }));
}

// A worker's number comes from add_worker.
std::uint32_t known(LiveNet& self, std::uint32_t worker) {
  if (worker < self.net().workers()) return worker;
  throw Error(ErrorKind::InvalidArgument, "worker ", worker, " is not in this network; call add_worker first");
}

void bind_live_net(nb::module_& m) {
  nb::class_<LiveNet>(m, "LiveNet", "Hand-offs between the engines of a process, and workers of others that are far.")
      .def(nb::init<const HandOffLinks&>(), "links"_a)
      .def(
          "add_worker",
          [](LiveNet& self, bool produces, bool consumes, bool far) {
            return self.net().add_worker(produces, consumes, far);
          },
          nb::kw_only(), "produces"_a, "consumes"_a, "far"_a = false, "Add a worker and return its number.")
      .def(
          "run_until", [](LiveNet& self, std::int64_t now_ns) { self.run_until(now_ns); }, "now_ns"_a,
          "Finish the transfers that end by then.")
      .def_prop_ro(
          "next_wake_ns", [](LiveNet& self) { return self.next_wake_ns(); },
          "When a transfer next ends, or a side stops to wait for the other.")
      .def_prop_ro(
          "pushes", [](LiveNet& self) -> PushNet& { return self.pushes(); }, nb::rv_policy::reference_internal,
          "KV that prefill servers push, as SGLang's.")
      .def(
          "take_reached", [](LiveNet& self) { return self.net().take_reached(); },
          "Workers for which something has arrived since the last call.")
      .def(
          "take_wanted", [](LiveNet& self) { return self.net().take_wanted(); },
          "Far workers that were needed since the last call and are not connected.")
      .def(
          "connect",
          [](LiveNet& self, std::uint32_t worker, std::int64_t now_ns) {
            self.net().connect(known(self, worker), now_ns);
          },
          "worker"_a, "now_ns"_a, "Mark a worker as connected.")
      .def(
          "disconnect",
          [](LiveNet& self, std::uint32_t worker, std::int64_t now_ns) {
            self.net().disconnect(known(self, worker), now_ns);
          },
          "worker"_a, "now_ns"_a, "Mark a worker as unreachable: reads from it fail, those in flight when they end.")
      .def(
          "fail_reads",
          [](LiveNet& self, std::uint32_t worker, std::uint32_t count) {
            self.net().fail_reads(known(self, worker), count);
          },
          "worker"_a, "count"_a, "Let the next `count` reads by a worker fail when they end.")
      .def(
          "notify",
          [](LiveNet& self, std::uint32_t worker, RequestId request, std::int64_t now_ns) {
            self.net().notify(known(self, worker), request, now_ns);
          },
          "worker"_a, "request"_a, "now_ns"_a, "Deliver a notification: the blocks of a request were read.")
      .def(
          "heartbeat",
          [](LiveNet& self, std::uint32_t worker, std::vector<RequestId> requests, std::int64_t now_ns) {
            self.net().heartbeat(known(self, worker), {now_ns, std::move(requests)});
          },
          "worker"_a, "requests"_a, "now_ns"_a, "Deliver a heartbeat for requests.")
      .def(
          "take_notes",
          [](LiveNet& self, std::uint32_t worker) {
            std::vector<RequestId> out;
            self.net().take_notes(known(self, worker), HandOffNet::kNever, out);
            return out;
          },
          "worker"_a, "Take the notifications to a far worker.")
      .def(
          "take_heartbeats",
          [](LiveNet& self, std::uint32_t worker) {
            std::vector<HandOffNet::Heartbeat> heartbeats;
            self.net().take_heartbeats(known(self, worker), HandOffNet::kNever, heartbeats);
            std::vector<std::vector<RequestId>> out;
            for (HandOffNet::Heartbeat& heartbeat : heartbeats) out.push_back(std::move(heartbeat.requests));
            return out;
          },
          "worker"_a, "Take the heartbeats to a far worker.")
      .def("take_ended", &take_ended,
           "Reads that have ended, oldest first: (from, to, bytes, posted ns, landed ns, failed).")
      .def(
          "late_notifications",
          [](LiveNet& self, std::uint32_t worker) { return self.net().late_notifications(known(self, worker)); },
          "worker"_a, "Notifications of reads from a worker that came after the lease of the blocks.")
      .def("in_flight", &in_flight, "worker"_a, "Reads in flight by or from a worker.");
}

}  // namespace

void bind_disaggregation(nb::module_& m) {
  nb::class_<Decider>(m, "Decider", "Decides whether a prefill worker computes the prompt of a request.")
      .def(
          "remote",
          [](Decider& self, std::uint32_t prompt_tokens, std::uint32_t cached_tokens, std::uint64_t session) {
            RouteRequest request;
            request.prompt_tokens = prompt_tokens;
            request.session = session;
            return self.remote(request, cached_tokens);
          },
          "prompt_tokens"_a, "cached_tokens"_a, "session"_a, "Whether a prefill worker computes this prompt.")
      .def_prop_ro("reads_cache", &Decider::reads_cache, "Whether it reads the decode worker's cache.");
  m.def(
      "uncached_rule", &make_rule, nb::kw_only(), "prompt_tokens"_a = 0, "uncached_tokens"_a = 0,
      "uncached_share"_a = 0.0, "either"_a = false,
      "Remote if the prompt has `prompt_tokens`, and the decode worker lacks `uncached_tokens` and `uncached_share` of "
      "it; with `either`, one of both is enough.");
  m.def(
      "user_decider",
      [](PyType<"understudy.core_types.UserDecider"> user) {
        return std::shared_ptr<Decider>(new UserDecider(std::move(user)));
      },
      "user"_a, "An object with remote(prompt_tokens, cached_tokens, session) as a decider.");
  nb::class_<HandOffLinks> links(m, "HandOffLinks", "Links of hand-offs, 10^9 bytes per second; infinity: no limit.");
  Fields<HandOffLinks>()
      .add("out_gbps", &HandOffLinks::out_gbps)
      .add("in_gbps", &HandOffLinks::in_gbps)
      .add("backend_gbps", &HandOffLinks::backend_gbps)
      .add("fixed_ns", &HandOffLinks::fixed_ns)
      .add("bytes_per_block", &HandOffLinks::bytes_per_block, std::uint64_t{1} << 38)
      .bind(links);
  bind_push_net(m);
  bind_live_net(m);
  nb::class_<Disaggregation> pools(m, "Disaggregation", "How requests are divided between prefill and decode pools.");
  Fields<Disaggregation>()
      .add("seed", &Disaggregation::seed)
      .add("decode_routing", kRoutingType, "",
           [](Disaggregation& self, nb::handle routing) { self.decode_router = read_router(routing, self.seed); })
      .add("decider", &Disaggregation::decider)
      .required()
      .add("decode_first", &Disaggregation::decode_first)
      .add("hop_ns", &Disaggregation::hop_ns)
      .add("links", &Disaggregation::links)
      .add("transfer_failure_rate", &Disaggregation::transfer_failure_rate)
      .bind(pools);

  nb::class_<HandOffColumns> columns(m, "HandOffColumns", "One row a request; -1 for what never happened.");
  const auto add = [&](const char* name, auto member) {
    columns.def_prop_ro(name, [member](const HandOffColumns& self) { return to_array(self.*member); });
  };
  add("way", &HandOffColumns::way);
  add("prefill_worker", &HandOffColumns::prefill_worker);
  add("prefill_admit_ns", &HandOffColumns::prefill_admit_ns);
  add("prefill_done_ns", &HandOffColumns::prefill_done_ns);
  add("decode_arrival_ns", &HandOffColumns::decode_arrival_ns);
  add("offered_ns", &HandOffColumns::offered_ns);
  add("posted_ns", &HandOffColumns::posted_ns);
  add("landed_ns", &HandOffColumns::landed_ns);
  add("bytes", &HandOffColumns::bytes);
  add("decode_admit_ns", &HandOffColumns::decode_admit_ns);
  columns.def_ro("pushed_busy_ns", &HandOffColumns::pushed_busy_ns,
                 "Of the run: time in which pushed KV moved; -1: none is pushed.");
}

}  // namespace understudy
