#include "tiers/evicted_keys.hpp"

#include "base/assert.hpp"

namespace understudy {

EvictedKeys::Node EvictedKeys::find(const LineageHash& key) const noexcept {
  const std::uint32_t wanted = hash(key);
  const std::uint8_t its_mark = mark(wanted);
  for (std::size_t at = home(wanted); marks_[at] != kEmpty; at = next(at)) {
    if (marks_[at] == its_mark && nodes_[holders_[at]].key == key) return holders_[at];
  }
  return kNone;
}

void EvictedKeys::add(List list, const LineageHash& key) {
  if (4 * (closed_ + 1) > 3 * marks_.size()) {
    const std::size_t keys = size(kOnce) + size(kOften);
    make_table(8 * (keys + 1) > 5 * marks_.size() ? 2 * marks_.size() : marks_.size());
  }
  if (free_ == kNone) {
    nodes_.push_back({key, kNone, kNone, 0, list});
    free_ = static_cast<Node>(nodes_.size() - 1);
  }
  const Node node = free_;
  free_ = nodes_[node].next;
  nodes_[node].key = key;
  nodes_[node].list = list;
  link(node);
  enter(node);
}

void EvictedKeys::remove(Node node) noexcept {
  const std::size_t place = nodes_[node].place;
  if (marks_[next(place)] == kEmpty) {  // no search continues past it
    marks_[place] = kEmpty;
    --closed_;
  } else {
    marks_[place] = kDeleted;
  }
  unlink(node);
  nodes_[node].next = free_;
  free_ = node;
}

void EvictedKeys::refresh(Node node) noexcept {
  unlink(node);
  link(node);
}

void EvictedKeys::trim(List list, std::size_t size) noexcept {
  while (ends_[list].size > size) remove(ends_[list].front);
}

// Rebuilds the table with `places` places.
void EvictedKeys::make_table(std::size_t places) {
  marks_.assign(places, kEmpty);
  holders_.resize(places);
  closed_ = 0;
  for (const Ends& ends : ends_) {
    for (Node node = ends.front; node != kNone; node = nodes_[node].next) enter(node);
  }
}

void EvictedKeys::enter(Node node) noexcept {
  const std::uint32_t its_hash = hash(nodes_[node].key);
  std::size_t at = home(its_hash);
  while (marks_[at] > kDeleted) at = next(at);
  if (marks_[at] == kEmpty) ++closed_;
  UNDERSTUDY_ASSERT(closed_ < marks_.size(), "the table of evicted keys is full");
  marks_[at] = mark(its_hash);
  holders_[at] = node;
  nodes_[node].place = static_cast<std::uint32_t>(at);
}

void EvictedKeys::link(Node node) noexcept {
  Ends& ends = ends_[nodes_[node].list];
  nodes_[node].prev = ends.back;
  nodes_[node].next = kNone;
  (ends.back == kNone ? ends.front : nodes_[ends.back].next) = node;
  ends.back = node;
  ++ends.size;
}

void EvictedKeys::unlink(Node node) noexcept {
  const Entry& entry = nodes_[node];
  Ends& ends = ends_[entry.list];
  (entry.prev == kNone ? ends.front : nodes_[entry.prev].next) = entry.next;
  (entry.next == kNone ? ends.back : nodes_[entry.next].prev) = entry.prev;
  UNDERSTUDY_ASSERT(ends.size > 0, "removes a key from an empty list");
  --ends.size;
}

}  // namespace understudy
