#include "events/event_ring.hpp"

#include <algorithm>
#include <utility>

#include "base/assert.hpp"

namespace understudy {

// Drops the oldest records. Memory is reclaimed when half of it is unused.
void EventRing::forget(std::size_t count) {
  UNDERSTUDY_ASSERT(count <= size(), "forgets more events than there are");
  if (tokens_per_block_ != 0) {
    const auto begin = records_.begin() + static_cast<std::ptrdiff_t>(head_);
    const auto stored = std::count_if(begin, begin + static_cast<std::ptrdiff_t>(count),
                                      [](const EventRecord& r) { return r.kind == EventKind::Stored; });
    tokens_head_ += static_cast<std::size_t>(stored) * tokens_per_block_;
  }
  head_ += count;
  if (head_ * 2 < records_.size()) return;
  records_.erase(records_.begin(), records_.begin() + static_cast<std::ptrdiff_t>(head_));
  tokens_.erase(tokens_.begin(), tokens_.begin() + static_cast<std::ptrdiff_t>(tokens_head_));
  head_ = tokens_head_ = 0;
}

DrainedEvents EventRing::drain(std::size_t limit) {
  DrainedEvents out;
  if (head_ == 0 && limit >= records_.size()) {  // all records, without a copy
    out.records = std::exchange(records_, {});
    out.tokens = std::exchange(tokens_, {});
  } else {
    const std::size_t count = std::min(limit, size());
    const std::size_t tokens_before = tokens_head_;
    const auto begin = records_.begin() + static_cast<std::ptrdiff_t>(head_);
    out.records.assign(begin, begin + static_cast<std::ptrdiff_t>(count));
    if (tokens_per_block_ != 0) {
      const auto stored = std::count_if(out.records.begin(), out.records.end(),
                                        [](const EventRecord& r) { return r.kind == EventKind::Stored; });
      const auto first = tokens_.begin() + static_cast<std::ptrdiff_t>(tokens_before);
      out.tokens.assign(first, first + stored * static_cast<std::ptrdiff_t>(tokens_per_block_));
    }
    forget(count);
  }
  out.lost = lost_;
  lost_ = 0;
  return out;
}

void EventRing::clear() noexcept {
  records_.clear();
  tokens_.clear();
  head_ = tokens_head_ = 0;
  lost_ = 0;
}

}  // namespace understudy
