// The result of a schedule: a batch, and the log of its decisions.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/step_load.hpp"
#include "engine/vllm/connector/output.hpp"
#include "engine/vllm/kv_backend.hpp"

namespace understudy {

// An entry of the batch: the tokens that one request computes.
struct Scheduled {
  RequestSlot slot;
  std::uint32_t tokens;
  std::uint32_t before;  // tokens computed before
  bool samples;
  RequestId id;              // the slot may belong to another request since
  std::uint32_t drafts = 0;  // tokens that are drafts to be verified
  bool blank = false;        // all drafts are blank and will be rejected
};

// Scheduled together; run together.
struct Batch {
  static constexpr std::int64_t kUnknown = -1;

  std::vector<Scheduled> turns;
  StepLoad load;
  std::int64_t duration_ns = 0;               // kUnknown until the first query
  std::unique_ptr<ConnectorMetadata> meta{};  // the connector's orders, carried out from the begin of the batch
  ConnectorOutput output{};                   // reports of the worker, for the update of this batch

  bool empty() const noexcept { return turns.empty(); }
};

// The connector's part of a schedule, which goes with its batch.
struct ConnectorOrders {
  std::unique_ptr<ConnectorMetadata> meta;  // to the worker
  ConnectorOutput output;                   // found by the poll of the schedule
};

// Blocks that a step in flight still writes.
struct KeptBlocks {
  std::uint64_t step = 0;
  KvTable table;
};

// Requests in the queues that need blocks from below.
struct FetchStages {
  std::size_t to_start = 0;
  std::size_t under_way = 0;
  std::size_t done = 0;  // and not admitted yet
};

// Decisions of the last step, in vLLM's order. If there were two schedules (asynchronously, behind an empty queue),
// `scheduled` is the second one's.
struct StepLog {
  std::vector<Scheduled> scheduled;
  std::vector<RequestId> admitted;  // with `resumed` and `cached` of the same length
  std::vector<bool> resumed;
  std::vector<std::uint32_t> cached;
  std::vector<RequestId> preempted;
  std::vector<RequestId> preempted_for;                  // requests that needed the room
  std::vector<RequestId> finished;                       // reported to the scheduler since
  std::vector<std::pair<RequestId, std::string>> ended;  // names of these, and of requests cancelled since
  std::uint64_t free_after_schedule = 0;

  void clear() noexcept {  // keeps the memory
    scheduled.clear();
    admitted.clear();
    resumed.clear();
    cached.clear();
    preempted.clear();
    preempted_for.clear();
    finished.clear();
    ended.clear();
    free_after_schedule = 0;
  }
};

}  // namespace understudy
