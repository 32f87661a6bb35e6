// A log of allocations and evictions, for diagnosis.
#pragma once

#include <cstddef>
#include <cstdint>

namespace understudy {

// Blocks that one call allocated or evicted, and the pool afterwards.
struct KvTraceRecord {
  bool eviction = false;
  std::size_t blocks = 0;
  std::uint64_t free = 0;
  std::uint64_t active = 0;
  std::uint64_t inactive = 0;
};

struct TimedKvTrace {
  std::int64_t time_ns = 0;  // the beginning of the step
  KvTraceRecord record;
};

}  // namespace understudy
