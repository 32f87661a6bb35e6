#include "links/link_usage.hpp"

#include <algorithm>
#include <cstddef>

namespace understudy {

void LinkUsage::spread(double from_ns, double to_ns, double bytes) {
  while (to_ns >= static_cast<double>(bucket_ns) * static_cast<double>(kMaxBuckets)) {
    const std::size_t half = (bucket_bytes.size() + 1) / 2;
    for (std::size_t i = 0; i < half; ++i) {
      const std::size_t right = 2 * i + 1;
      bucket_bytes[i] = bucket_bytes[2 * i] + (right < bucket_bytes.size() ? bucket_bytes[right] : 0);
    }
    bucket_bytes.resize(half);
    bucket_ns *= 2;
  }
  const double width = static_cast<double>(bucket_ns);
  const auto first = static_cast<std::size_t>(from_ns / width);
  const auto last = static_cast<std::size_t>(to_ns / width);
  if (bucket_bytes.size() <= last) bucket_bytes.resize(last + 1);
  if (first == last) {
    bucket_bytes[first] += bytes;
    return;
  }
  for (std::size_t i = first; i <= last; ++i) {
    const double begin = std::max(from_ns, static_cast<double>(i) * width);
    const double end = std::min(to_ns, static_cast<double>(i + 1) * width);
    bucket_bytes[i] += bytes * ((end - begin) / (to_ns - from_ns));
  }
}

}  // namespace understudy
