// The prefill instance: blocks of finished prompts that are kept until they were read, or until their lease ends.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "base/request_id.hpp"
#include "engine/vllm/handoff/settings.hpp"

namespace understudy {

// Orders of a schedule to the worker of the same instance.
struct SendOrders {
  std::vector<RequestId> in_batch;                          // admitted prompts that a peer will read
  std::vector<RequestId> not_processed;                     // those that ended before their prompt was computed
  std::vector<std::pair<RequestId, std::int64_t>> to_send;  // finished ones, with the end of their lease in ns
};

// A poll of the worker: leases that ended, and reads that were confirmed.
struct SendPoll {
  std::vector<RequestId> sent;     // in ascending order; their blocks can be freed
  std::vector<RequestId> expired;  // part of them: no decode worker read them
};

// Scheduler and worker of one instance. A worker forgets a request when it reports it.
class KvSender {
 public:
  explicit KvSender(const VllmTransfer& settings) : lease_ns_(settings.lease_s * kSecond) {
    extension_ns_ = settings.lease_s * 2 / 3 * kSecond;
  }

  // ── Scheduler ──
  void admitted(RequestId id) { orders_.in_batch.push_back(id); }
  void aborted(RequestId id) { orders_.not_processed.push_back(id); }
  // The prompt is computed: its lease begins.
  void finished(RequestId id, std::int64_t now_ns) { orders_.to_send.emplace_back(id, now_ns + lease_ns_); }
  SendOrders close_schedule();

  // ── Worker ──
  void begin(const SendOrders& orders);
  void extend(std::span<const RequestId> ids, std::int64_t now_ns);  // a heartbeat
  bool confirm(RequestId id);  // its blocks were read; false: they are not kept any longer
  SendPoll poll(std::int64_t now_ns);

  // ── Watch ──
  bool has_orders() const noexcept { return !orders_.not_processed.empty() || !orders_.to_send.empty(); }
  std::int64_t next_deadline_ns() const;  // kNever: no lease
  const std::vector<std::pair<RequestId, std::int64_t>>& leases() const noexcept { return leases_; }

 private:
  static constexpr std::int64_t kSecond = 1'000'000'000;

  std::int64_t lease_ns_;
  std::int64_t extension_ns_ = 0;                           // by a heartbeat, from when it is read
  SendOrders orders_;                                       // of the next schedule
  std::set<RequestId> known_;                               // to the worker: admitted and not reported
  std::vector<std::pair<RequestId, std::int64_t>> leases_;  // with their ends, in the order in which they began
  std::vector<RequestId> confirmed_;
};

}  // namespace understudy
