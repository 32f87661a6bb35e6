#include "events/event_ring.hpp"

#include <algorithm>

namespace understudy {

void EventRing::stored(const BlockIdentity& block, std::uint64_t generation, Tier tier, bool first,
                       const Token* tokens) {
  push({next_id_, block, generation, EventKind::Stored, tier, starts_, first});
  if (tokens_per_block_ != 0) tokens_.insert(tokens_.end(), tokens, tokens + tokens_per_block_);
}

void EventRing::removed(const BlockIdentity& block, std::uint64_t generation, Tier tier, bool last) {
  push({next_id_, block, generation, EventKind::Removed, tier, starts_, last});
}

void EventRing::push(const EventRecord& record) {
  if (capacity_ != 0 && records_.size() == capacity_) {
    if (tokens_per_block_ != 0 && records_.front().kind == EventKind::Stored) {
      tokens_.erase(tokens_.begin(), tokens_.begin() + static_cast<std::ptrdiff_t>(tokens_per_block_));
    }
    records_.pop_front();
    ++lost_;
  }
  records_.push_back(record);
  starts_ = false;
  ++next_id_;
}

DrainedEvents EventRing::drain(std::size_t limit) {
  DrainedEvents out;
  const auto count = static_cast<std::ptrdiff_t>(std::min(limit, records_.size()));
  out.records.assign(records_.begin(), records_.begin() + count);
  records_.erase(records_.begin(), records_.begin() + count);
  if (tokens_per_block_ != 0) {
    const auto stored = std::count_if(out.records.begin(), out.records.end(),
                                      [](const EventRecord& r) { return r.kind == EventKind::Stored; });
    const auto tokens = stored * static_cast<std::ptrdiff_t>(tokens_per_block_);
    out.tokens.assign(tokens_.begin(), tokens_.begin() + tokens);
    tokens_.erase(tokens_.begin(), tokens_.begin() + tokens);
  }
  out.lost = lost_;
  lost_ = 0;
  return out;
}

}  // namespace understudy
