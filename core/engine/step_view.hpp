// A step as a recorder sees it: its batch, the decisions of its schedule, and why no further request was admitted.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "base/request_id.hpp"

namespace understudy {

// Why the last schedule left requests in the queue.
enum class AdmissionStop : std::uint8_t {
  None,       // it left none
  Slots,      // as many requests run as may
  Budget,     // the step's tokens are spent
  Blocks,     // the first in the queue lacks KV blocks
  Transfers,  // the first in the queue waits for blocks that are being copied or loaded
  Preempted,  // this schedule has preempted a request, and so admits none
  Other,      // adapters, an interval between prefills, or admission is off
};

struct StepEntry {
  RequestId request = 0;
  std::uint32_t tokens = 0;
  std::uint32_t before = 0;   // tokens that have their KV
  bool decodes = false;       // else its tokens are a chunk
  std::int64_t alone_ns = 0;  // duration of a step with this entry only
};

struct StepAdmission {
  RequestId request = 0;
  bool resumed = false;
  std::uint32_t cached_tokens = 0;
};

struct StepPreemption {
  RequestId request = 0;
  RequestId by = 0;  // the request that needed the room; itself where none is known
};

struct StepView {
  bool is_open = false;  // false: a schedule ahead of its step, which has decisions only
  std::vector<StepEntry> entries;
  std::int64_t compute_ns = 0;  // duration by the timing model, without transfers and other ranks
  std::int64_t decodes_ns = 0;  // the same of its decodes alone; 0: it has none, or nothing else
  std::vector<StepAdmission> admitted;
  std::vector<StepPreemption> preempted;
  std::vector<RequestId> loading;  // requests whose blocks are being loaded
  AdmissionStop stop = AdmissionStop::None;
  RequestId head = kNoRequest;  // first in the queue
  std::uint64_t running = 0;
  std::uint64_t waiting = 0;  // requests whose blocks are loaded included
  std::uint64_t active_blocks = 0;

  static constexpr RequestId kNoRequest = ~RequestId{0};

  void clear() noexcept {  // keeps the memory
    StepView kept = std::move(*this);
    kept.entries.clear();
    kept.admitted.clear();
    kept.preempted.clear();
    kept.loading.clear();
    *this = {};
    entries.swap(kept.entries);
    admitted.swap(kept.admitted);
    preempted.swap(kept.preempted);
    loading.swap(kept.loading);
  }
};

}  // namespace understudy
