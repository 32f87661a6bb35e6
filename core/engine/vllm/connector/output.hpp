// What passes between the two halves of a connector: orders of a schedule, and what the worker reports.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/request_id.hpp"

namespace understudy {

using JobId = std::uint64_t;

// Orders of one schedule to the worker, known to the connector that gave them.
class ConnectorMetadata {
 public:
  virtual ~ConnectorMetadata() = default;
};

// Results of the worker, which the update of the same batch reads.
struct ConnectorOutput {
  std::vector<RequestId> sent;      // whose kept blocks can be freed
  std::vector<RequestId> received;  // whose load has ended
  std::vector<RequestId> failed;    // part of these: without their blocks
  std::vector<JobId> jobs;          // of a host: copies that are done, in order
  std::uint64_t expired = 0;        // part of `sent`: no peer has read them

  bool empty() const noexcept { return sent.empty() && received.empty() && jobs.empty(); }
};

}  // namespace understudy
