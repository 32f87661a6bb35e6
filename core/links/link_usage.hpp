// What a link has carried.
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
  std::int64_t busy_ns = 0;  // bytes of at least one transfer were flowing (background that waits for demand included)

  // Bytes moved in each interval of `bucket_ns` since time 0. When there are too many intervals, neighbours merge.
  static constexpr std::size_t kMaxBuckets = 1024;
  std::int64_t bucket_ns = 1'000'000;
  std::vector<double> bucket_bytes;

  // The interval that bytes went to last: what lies within needs no division.
  struct {
    double begin_ns = 1;  // none
    double end_ns = 0;
    std::size_t bucket = 0;
  } last;

  // `bytes` moved evenly from one time to another.
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
