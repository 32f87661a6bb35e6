// Hand-offs of KV blocks in Python: their settings, and a step's log in the words of a recording.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "engine/vllm/lockstep.hpp"
#include "engine/vllm/view.hpp"
#include "exclusive_class.hpp"
#include "fields.hpp"
#include "named.hpp"

namespace understudy {

namespace {

using namespace nb::literals;

// A call of the lockstep without arguments.
template <auto Call>
auto lockstep() {
  return [](VllmEngine& self) { return (VllmLockstep(self).*Call)(); };
}

KvSender& sender_of(VllmEngine& engine) {
  if (KvSender* const sender = VllmLockstep(engine).parts().sender; sender != nullptr) return *sender;
  throw Error(ErrorKind::WrongState, "this engine keeps no blocks for others; set kv_role to kv_producer");
}

VllmConfig with_transfer(const VllmConfig& self, const VllmTransfer& transfer) {
  VllmConfig config = self;
  config.transfer = transfer;
  return config;
}

VllmConfig with_multi(const VllmConfig& self, bool consumes, bool host_first, bool log) {
  VllmConfig config = self;
  config.multi = VllmMulti{consumes, host_first, log};
  return config;
}

PyType<"understudy.core_types.MultiLine"> take_multi_line(VllmEngine& self) {
  MultiConnector* const multi = VllmLockstep(self).parts().multi;
  if (multi == nullptr) throw Error(ErrorKind::WrongState, "this engine has not several connectors");
  const MultiLog log = std::exchange(multi->log(), {});
  nb::dict line;
  nb::list lookups;
  for (const MultiLog::Lookup& row : log.lookups) {
    lookups.append(nb::make_tuple(row.request, row.local, nb::cast(row.result), nb::cast(row.answers)));
  }
  line["lookups"] = lookups;
  line["told"] = nb::cast(log.told);
  return line;
}

PyType<"understudy.core_types.HandOffLine"> take_line(VllmEngine& self) {
  NixlConnector* const nixl = VllmLockstep(self).parts().nixl;
  if (nixl == nullptr) throw Error(ErrorKind::WrongState, "this engine hands no blocks over; set kv_role");
  const HandOffLog log = std::exchange(nixl->log(), {});
  nb::dict line;
  nb::list lookups;
  for (const HandOffLog::Lookup& row : log.lookups)
    lookups.append(nb::make_tuple(row.request, row.local, row.external));
  nb::list pulls;
  for (const Pull& pull : log.receive.pulls) pulls.append(nb::make_tuple(pull.request, nb::cast(pull.blocks)));
  line["lookups"] = lookups;
  line["in_batch"] = nb::cast(log.send.in_batch);
  line["not_processed"] = nb::cast(log.send.not_processed);
  line["to_send"] = nb::cast(log.send.to_send);
  line["pulls"] = pulls;
  line["heartbeat"] = nb::cast(log.receive.heartbeat);
  return line;
}

}  // namespace

void bind_engine_handoff(ExclusiveClass<VllmEngine, Engine>& engine) {
  engine.def("take_handoff_line", &take_line, "Take the log of the last schedule and update, if logged.")
      .def("take_multi_line", &take_multi_line, "Take the log of several connectors since the last call, if logged.")
      .def(
          "poll_sender",
          [](VllmEngine& self, const std::vector<std::vector<RequestId>>& heartbeats,
             const std::vector<RequestId>& done, std::int64_t now_ns) {
            KvSender& sender = sender_of(self);
            for (const std::vector<RequestId>& ids : heartbeats) sender.extend(ids, now_ns);
            for (const RequestId id : done) (void)sender.confirm(id);
            const SendPoll poll = sender.poll(now_ns);
            return std::tuple(poll.sent, poll.expired, sender.leases());
          },
          "heartbeats"_a, "done"_a, "now_ns"_a,
          "Poll as the prefill instance's worker does; returns (sent, expired, leases with their ends in ns).")
      .def(
          "give_report",
          [](VllmEngine& self, std::vector<RequestId> sent, std::vector<RequestId> received,
             std::vector<RequestId> failed, std::vector<JobId> jobs) {
            VllmLockstep(self).give_report({std::move(sent), std::move(received), std::move(failed), std::move(jobs)});
          },
          nb::kw_only(), "sent"_a, "received"_a, "failed"_a, "jobs"_a = std::vector<JobId>{},
          "What the poll found, for the update of the batch that was scheduled last.")
      .def(
          "begin_last_update",
          [](VllmEngine& self, std::int64_t now_ns) { VllmLockstep(self).begin_last_update(now_ns); }, "now_ns"_a,
          "Asynchronously: let the batch that was scheduled last be the next to end, with no other behind it.")
      .def(
          "status",
          [](const VllmEngine& self, RequestId id) -> std::optional<std::string> {
            if (!VllmView(self).has(id)) return std::nullopt;
            constexpr const char* kNames[] = {
                "WAITING", "RUNNING", "PREEMPTED", "WAITING_FOR_REMOTE_KVS", "WAITING_FOR_REMOTE_KVS", "FINISHED"};
            return kNames[static_cast<std::size_t>(self.request(id).status)];
          },
          "request"_a, "State of a request in vLLM's words; None if it is not here.")
      .def("reset_caches", &VllmEngine::reset_caches, "now_ns"_a,
           "Drop what the connector stores, and the device's blocks if none is in use; returns whether all of it was.")
      .def_prop_ro("has_ended", lockstep<&VllmLockstep::has_ended>(),
                   "Whether a request ended since the last schedule.")
      .def_prop_ro("handoff_pending", lockstep<&VllmLockstep::handoff_pending>(),
                   "Whether blocks are kept for a peer, or a notification is due.")
      .def_prop_ro("deferred_blocks", lockstep<&VllmLockstep::deferred_blocks>(),
                   "Blocks of ended requests that a step in flight may still write.")
      .def_prop_ro("holding", lockstep<&VllmLockstep::holding>(), "Waiting requests that hold blocks, in order.")
      .def_prop_ro("orphans", lockstep<&VllmLockstep::orphans>(), "Aborted requests whose blocks are still to come.")
      .def_prop_ro(
          "held",
          [](VllmEngine& self) {
            std::vector<RequestId> ids;
            for (const auto& [id, table] : VllmLockstep(self).kept().tables()) ids.push_back(id);
            return ids;
          },
          "Finished requests whose blocks are kept for a peer.")
      .def(
          "held_blocks",
          [](VllmEngine& self, RequestId id) { return VllmLockstep(self).kept().tables().at(id).all_ids(); },
          "request"_a, "Blocks that are kept for a peer, in order.");
}

void bind_handoff(nb::module_& m) {
  nb::class_<VllmTransfer> transfer(m, "VllmTransfer",
                                    "Hand-offs of KV blocks by vLLM's NixlConnector, as an engine's setting.");
  Fields<VllmTransfer>()
      .add("produces", &VllmTransfer::produces)
      .add("consumes", &VllmTransfer::consumes)
      .add("recomputes", &VllmTransfer::recomputes)
      .add("lease_s", &VllmTransfer::lease_s)
      .add("log", &VllmTransfer::log)
      .bind(transfer);
  m.def("with_multi", &with_multi, "config"_a, nb::kw_only(), "consumes"_a, "host_first"_a = false, "log"_a = false,
        "A copy whose engines hand blocks to others and offload to the host, through vLLM's MultiConnector.");
  m.def("with_transfer", &with_transfer, "config"_a, "transfer"_a, "A copy whose engines hand blocks to others.");
}

}  // namespace understudy
