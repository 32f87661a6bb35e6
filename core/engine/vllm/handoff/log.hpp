// Log of a step of hand-offs, in the words of a recording.
#pragma once

#include <cstdint>
#include <vector>

#include "base/request_id.hpp"
#include "engine/vllm/handoff/receiver.hpp"
#include "engine/vllm/handoff/sender.hpp"

namespace understudy {

struct HandOffLog {
  struct Lookup {
    RequestId request = 0;
    std::uint32_t local = 0;
    std::uint32_t external = 0;
  };
  std::vector<Lookup> lookups;
  SendOrders send;
  ReceiveOrders receive;
};

}  // namespace understudy
