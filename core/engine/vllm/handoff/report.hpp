// Results of a worker's poll, which the update of the same batch reads; and the log of a step.
#pragma once

#include <cstdint>
#include <vector>

#include "base/request_id.hpp"
#include "engine/vllm/handoff/receiver.hpp"
#include "engine/vllm/handoff/sender.hpp"

namespace understudy {

struct HandOffReport {
  std::vector<RequestId> sent;      // blocks that the prefill instance may free
  std::vector<RequestId> received;  // requests whose transfer has ended
  std::vector<RequestId> failed;    // part of them

  bool empty() const noexcept { return sent.empty() && received.empty(); }
};

struct HandOffLog {
  struct Lookup {
    RequestId request = 0;
    std::uint32_t local = 0;
    std::uint32_t external = 0;
  };
  std::vector<Lookup> lookups;
  SendOrders send;
  ReceiveOrders receive;
  std::vector<RequestId> failed;  // requests that the update ended
};

}  // namespace understudy
