// Usage counters of a link.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace understudy {

struct LinkUsage {
  std::string name;
  double bandwidth_gbps = 0;
  std::uint64_t transfers_started = 0;
  std::uint64_t transfers_finished = 0;
  std::uint64_t bytes_started = 0;
  std::uint64_t bytes_finished = 0;
  std::int64_t busy_ns = 0;  // time with at least one transfer flowing (background that waits for demand included)

  // Bytes moved in each interval of `bucket_ns` since time 0. Neighbours merge when there are more than kMaxBuckets.
  static constexpr std::size_t kMaxBuckets = 1024;
  std::int64_t bucket_ns = 1'000'000;
  std::vector<double> bucket_bytes;

  // Last interval used: bytes within it need no division.
  struct {
    double begin_ns = 1;  // none
    double end_ns = 0;
    std::size_t bucket = 0;
  } last;

  // Adds `bytes` that moved evenly between two times.
  void spread(double from_ns, double to_ns, double bytes) {
    if (from_ns >= last.begin_ns && to_ns <= last.end_ns) {
      bucket_bytes[last.bucket] += bytes;
    } else {
      spread_wide(from_ns, to_ns, bytes);
    }
  }

 private:
  void spread_wide(double from_ns, double to_ns, double bytes);
};

}  // namespace understudy
