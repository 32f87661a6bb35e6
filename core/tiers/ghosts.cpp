#include "tiers/ghosts.hpp"

#include <algorithm>
#include <utility>

namespace understudy {

Ghosts::Node Ghosts::find(const LineageHash& key) const noexcept {
  const std::uint32_t wanted = tag(key);
  for (std::size_t at = home(wanted); table_[at].node != kNobody; at = next(at)) {
    if (table_[at].tag == wanted && nodes_[table_[at].node].key == key) return table_[at].node;
  }
  return kNobody;
}

void Ghosts::add(List list, const LineageHash& key) {
  if (4 * (size(kOnce) + size(kOften) + 1) > 3 * table_.size()) grow();
  if (free_ == kNobody) {
    nodes_.push_back({key, kNobody, kNobody, list});
    free_ = static_cast<Node>(nodes_.size() - 1);
  }
  const Node node = free_;
  free_ = nodes_[node].next;
  nodes_[node].key = key;
  nodes_[node].list = list;
  link(node);
  enter(tag(key), node);
}

void Ghosts::remove(Node node) noexcept {
  leave(node);
  unlink(node);
  nodes_[node].next = free_;
  free_ = node;
}

void Ghosts::refresh(Node node) noexcept {
  unlink(node);
  link(node);
}

void Ghosts::trim(List list, std::size_t size) noexcept {
  while (ends_[list].size > size) {
    const std::size_t count = std::min<std::size_t>(ends_[list].size - size, 16);
    Node node = ends_[list].front;
    for (std::size_t i = 0; i < count; ++i, node = nodes_[node].next) warm(nodes_[node].key);
    for (std::size_t i = 0; i < count; ++i) remove(ends_[list].front);
  }
}

void Ghosts::enter(std::uint32_t tag, Node node) noexcept {
  std::size_t at = home(tag);
  while (table_[at].node != kNobody) at = next(at);
  table_[at] = {tag, node};
}

// Those behind it move up, unless they are at home already or would pass it.
void Ghosts::leave(Node node) noexcept {
  std::size_t gap = home(tag(nodes_[node].key));
  while (table_[gap].node != node) gap = next(gap);
  const std::size_t mask = table_.size() - 1;
  for (std::size_t at = next(gap); table_[at].node != kNobody; at = next(at)) {
    if (((at - home(table_[at].tag)) & mask) < ((at - gap) & mask)) continue;
    table_[gap] = table_[at];
    gap = at;
  }
  table_[gap] = {};
}

void Ghosts::grow() {
  const Table before = std::exchange(table_, Table(2 * table_.size()));
  for (const Entry& entry : before) {
    if (entry.node != kNobody) enter(entry.tag, entry.node);
  }
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
