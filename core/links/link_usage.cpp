#include "links/link_usage.hpp"

#include <algorithm>
#include <cstddef>

namespace understudy {

namespace {

constexpr double kShortOfNext = 1 - 1e-12;  // a quotient below it cannot round up to the next interval

}  // namespace

void LinkUsage::spread_wide(double from_ns, double to_ns, double bytes) {
  while (to_ns >= static_cast<double>(bucket_ns) * static_cast<double>(kMaxBuckets)) {
    const std::size_t half = (bucket_bytes.size() + 1) / 2;
    for (std::size_t i = 0; i < half; ++i) {
      const std::size_t right = 2 * i + 1;
      bucket_bytes[i] = bucket_bytes[2 * i] + (right < bucket_bytes.size() ? bucket_bytes[right] : 0);
    }
    bucket_bytes.resize(half);
    bucket_ns *= 2;
    last = {};
  }
  const double width = static_cast<double>(bucket_ns);
  const auto first = static_cast<std::size_t>(from_ns / width);
  const auto end = static_cast<std::size_t>(to_ns / width);
  if (bucket_bytes.size() <= end) bucket_bytes.resize(end + 1);
  if (first == end) {
    bucket_bytes[first] += bytes;
    const auto begin = static_cast<double>(first);
    last = {begin * width, (begin + 1) * width * kShortOfNext, first};
    return;
  }
  for (std::size_t i = first; i <= end; ++i) {
    const double begins = std::max(from_ns, static_cast<double>(i) * width);
    const double ends = std::min(to_ns, static_cast<double>(i + 1) * width);
    bucket_bytes[i] += bytes * ((ends - begins) / (to_ns - from_ns));
  }
}

}  // namespace understudy
