#include "router/live_prompts.hpp"

#include <algorithm>

#include "base/assert.hpp"

namespace understudy {

namespace {

std::size_t common(std::span<const std::uint64_t> one, std::span<const std::uint64_t> other) {
  return static_cast<std::size_t>(std::ranges::mismatch(one, other).in1 - one.begin());
}

}  // namespace

LivePrompts::Node LivePrompts::enter(std::span<const std::uint64_t> prompt, std::uint32_t worker) {
  Node last = 0;
  while (!prompt.empty()) {
    Node next = child(last, prompt[0]);
    if (next == 0) {
      next = make(last, prompt);
    } else if (const std::size_t shared = common(nodes_[next].blocks, prompt); shared < nodes_[next].blocks.size()) {
      next = split(next, shared);
    }
    hold(next, worker);
    prompt = prompt.subspan(nodes_[next].blocks.size());
    last = next;
  }
  return last;
}

void LivePrompts::leave(Node last, std::uint32_t worker) {
  for (Node node = last; node != 0;) {
    Stretch& stretch = nodes_[node];
    const Node parent = stretch.parent;
    const auto holder = std::ranges::lower_bound(stretch.holders, worker, {}, &Holder::worker);
    UNDERSTUDY_ASSERT(holder != stretch.holders.end() && holder->worker == worker && holder->prompts > 0,
                      "a prompt leaves that never entered");
    if (--holder->prompts == 0) {
      blocks_[worker] -= stretch.blocks.size();
      stretch.holders.erase(holder);
    }
    if (stretch.holders.empty()) {
      forget(node);
    } else if (stretch.children == 1 && nodes_[stretch.child].holders == stretch.holders) {
      merge(node);
    }
    node = parent;
  }
}

void LivePrompts::match(std::span<const std::uint64_t> prompt, std::vector<std::uint32_t>& out) const {
  out.assign(blocks_.size(), 0);
  std::uint32_t depth = 0;
  for (Node node = 0; depth < prompt.size();) {
    node = child(node, prompt[depth]);
    if (node == 0) return;
    const Stretch& stretch = nodes_[node];
    const std::size_t shared = common(stretch.blocks, prompt.subspan(depth));
    depth += static_cast<std::uint32_t>(shared);
    for (const Holder& holder : stretch.holders) out[holder.worker] = depth;
    if (shared < stretch.blocks.size()) return;
  }
}

// ── Nodes ──

LivePrompts::Node LivePrompts::child(Node parent, std::uint64_t first) const {
  const auto at = children_.find({parent, first});
  return at == children_.end() ? 0 : at->second;
}

LivePrompts::Node LivePrompts::make(Node parent, std::span<const std::uint64_t> blocks) {
  if (free_.empty()) {
    free_.push_back(static_cast<Node>(nodes_.size()));
    nodes_.emplace_back();
  }
  const Node node = free_.back();
  free_.pop_back();
  nodes_[node].parent = parent;
  nodes_[node].blocks.assign(blocks.begin(), blocks.end());
  link(node);
  return node;
}

void LivePrompts::link(Node node) {
  const Stretch& stretch = nodes_[node];
  children_[{stretch.parent, stretch.blocks[0]}] = node;
  ++nodes_[stretch.parent].children;
  nodes_[stretch.parent].child ^= node;
}

void LivePrompts::unlink(Node node) {
  const Stretch& stretch = nodes_[node];
  children_.erase({stretch.parent, stretch.blocks[0]});
  UNDERSTUDY_ASSERT(nodes_[stretch.parent].children > 0, "a node has lost count of its children");
  --nodes_[stretch.parent].children;
  nodes_[stretch.parent].child ^= node;
}

// Splits the first blocks of a node into a node of their own, which is returned. Prompts that end in the node still do.
LivePrompts::Node LivePrompts::split(Node node, std::size_t at) {
  unlink(node);
  const std::vector<std::uint64_t> whole = std::move(nodes_[node].blocks);
  const Node head = make(nodes_[node].parent, std::span(whole).first(at));
  Stretch& tail = nodes_[node];
  nodes_[head].holders = tail.holders;
  tail.parent = head;
  tail.blocks.assign(whole.begin() + static_cast<std::ptrdiff_t>(at), whole.end());
  link(node);
  return head;
}

// Merges a node with its only child, into which all prompts continue.
void LivePrompts::merge(Node node) {
  const Node child = nodes_[node].child;
  unlink(child);
  Stretch& tail = nodes_[child];
  tail.blocks.insert(tail.blocks.begin(), nodes_[node].blocks.begin(), nodes_[node].blocks.end());
  tail.parent = nodes_[node].parent;
  forget(node);
  link(child);
}

void LivePrompts::forget(Node node) {
  unlink(node);
  nodes_[node] = {};
  free_.push_back(node);
}

void LivePrompts::hold(Node node, std::uint32_t worker) {
  Stretch& stretch = nodes_[node];
  const auto holder = std::ranges::lower_bound(stretch.holders, worker, {}, &Holder::worker);
  if (holder != stretch.holders.end() && holder->worker == worker) {
    ++holder->prompts;
  } else {
    stretch.holders.insert(holder, {worker, 1});
    blocks_[worker] += stretch.blocks.size();
  }
}

}  // namespace understudy
