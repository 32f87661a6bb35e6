#include "tiers/ghosts.hpp"

namespace understudy {

Ghosts::Node Ghosts::find(const LineageHash& key) const noexcept {
  const std::uint32_t wanted = hash(key);
  const std::uint8_t its_mark = mark(wanted);
  for (std::size_t at = home(wanted); marks_[at] != kEmpty; at = next(at)) {
    if (marks_[at] == its_mark && nodes_[holders_[at]].key == key) return holders_[at];
  }
  return kNobody;
}

void Ghosts::add(List list, const LineageHash& key) {
  if (4 * (closed_ + 1) > 3 * marks_.size()) {
    const std::size_t ghosts = size(kOnce) + size(kOften);
    make_table(8 * (ghosts + 1) > 5 * marks_.size() ? 2 * marks_.size() : marks_.size());
  }
  if (free_ == kNobody) {
    nodes_.push_back({key, kNobody, kNobody, 0, list});
    free_ = static_cast<Node>(nodes_.size() - 1);
  }
  const Node node = free_;
  free_ = nodes_[node].next;
  nodes_[node].key = key;
  nodes_[node].list = list;
  link(node);
  enter(node);
}

void Ghosts::remove(Node node) noexcept {
  const std::size_t place = nodes_[node].place;
  if (marks_[next(place)] == kEmpty) {  // nobody was sent past it
    marks_[place] = kEmpty;
    --closed_;
  } else {
    marks_[place] = kLeft;
  }
  unlink(node);
  nodes_[node].next = free_;
  free_ = node;
}

void Ghosts::refresh(Node node) noexcept {
  unlink(node);
  link(node);
}

void Ghosts::trim(List list, std::size_t size) noexcept {
  while (ends_[list].size > size) remove(ends_[list].front);
}

// A table of so many places, with those of all ghosts.
void Ghosts::make_table(std::size_t places) {
  marks_.assign(places, kEmpty);
  holders_.resize(places);
  closed_ = 0;
  for (const Ends& ends : ends_) {
    for (Node node = ends.front; node != kNobody; node = nodes_[node].next) enter(node);
  }
}

void Ghosts::enter(Node node) noexcept {
  const std::uint32_t its_hash = hash(nodes_[node].key);
  std::size_t at = home(its_hash);
  while (marks_[at] > kLeft) at = next(at);
  if (marks_[at] == kEmpty) ++closed_;
  marks_[at] = mark(its_hash);
  holders_[at] = node;
  nodes_[node].place = static_cast<std::uint32_t>(at);
}

void Ghosts::link(Node node) noexcept {
  Ends& ends = ends_[nodes_[node].list];
  nodes_[node].prev = ends.back;
  nodes_[node].next = kNobody;
  (ends.back == kNobody ? ends.front : nodes_[ends.back].next) = node;
  ends.back = node;
  ++ends.size;
}

void Ghosts::unlink(Node node) noexcept {
  const Ghost& ghost = nodes_[node];
  Ends& ends = ends_[ghost.list];
  (ghost.prev == kNobody ? ends.front : nodes_[ghost.prev].next) = ghost.next;
  (ghost.next == kNobody ? ends.back : nodes_[ghost.next].prev) = ghost.prev;
  --ends.size;
}

}  // namespace understudy
