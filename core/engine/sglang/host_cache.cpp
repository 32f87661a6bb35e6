#include "engine/sglang/host_cache.hpp"

#include <algorithm>
#include <utility>

#include "base/errors.hpp"

namespace understudy {

namespace {

// One page more than asked, as SGLang allocates it.
std::uint64_t host_tokens(const HostSettings& settings, std::uint32_t page, std::uint64_t device_tokens) {
  if (settings.tokens > 0) return settings.tokens;
  const auto asked = static_cast<std::uint64_t>(static_cast<double>(device_tokens) * settings.ratio);
  return (asked / page + 1) * page;
}

}  // namespace

HostCache::HostCache(const HostSettings& settings, std::uint32_t page_size, std::uint64_t device_tokens,
                     RadixTree& tree, RadixTree::OnChange on_change, HostTransfers& transfers)
    : settings_(settings),
      tree_(tree),
      on_change_(std::move(on_change)),
      transfers_(transfers),
      capacity_(host_tokens(settings, page_size, device_tokens)),
      avail_(static_cast<std::int64_t>(capacity_)) {
  tree_.set_watcher(this);
}

// ── Copies to the host ──

bool HostCache::reserve(std::uint32_t tokens) {
  const std::int64_t missing = std::int64_t{tokens} - avail_;
  if (missing > 0 && evict_host(missing) < missing) {
    ++totals_.refused_writes;
    return false;
  }
  avail_ -= tokens;
  totals_.stored += tokens;
  return true;
}

// Queues a copy to the host; the node is locked until it has landed. False: the host is full.
bool HostCache::backup(RadixNode& node) {
  if (!reserve(node.length())) return false;
  tree_.set_host(node, true);
  tree_.lock(&node);
  auto write = std::make_unique<HostWrite>();
  write->parts.push_back(&node);
  write->tokens = node.length();
  node.write = write.get();
  queued_writes_.push_back(std::move(write));
  ++num_writes_;
  return true;
}

void HostCache::on_hit(RadixNode& node) {
  const std::uint64_t threshold = settings_.policy == HostWritePolicy::WriteThrough ? 1 : 2;
  if (node.host || node.hits < threshold) return;
  std::vector<RadixNode*> chain;
  for (RadixNode* at = &node; at->parent != nullptr; at = at->parent) {
    if (!at->host) chain.push_back(at);
  }
  for (auto at = chain.rbegin(); at != chain.rend(); ++at) {
    if (!backup(**at)) return;
  }
}

void HostCache::submit_writes() {
  if (queued_writes_.empty()) return;
  std::uint64_t tokens = 0;
  for (const auto& write : queued_writes_) tokens += write->tokens;
  const std::int64_t earliest = writes_.empty() ? transfers_.now() : writes_.back().ready;
  writes_.push_back({transfers_.write_ready(tokens, earliest), std::exchange(queued_writes_, {})});
  submitted_writes_.push_back(tokens);
}

void HostCache::finish_write(const HostWrite& write) {
  for (RadixNode* const node : write.parts) {
    node->write = nullptr;
    on_change_(*node, true, RadixTier::Host);
    list_duplicate(*node);
  }
  tree_.unlock(write.parts.back());
  --num_writes_;
}

// ── Copies to the device ──

bool HostCache::load_back(RadixNode* last, std::int64_t& avail) {
  tree_.lock(last);
  tree_.lock_host(*last, true);
  auto load = std::make_unique<HostLoad>();
  for (RadixNode* node = last; !node->device; node = node->parent) {
    load->nodes.push_back(node);
    load->tokens += node->length();
  }
  std::ranges::reverse(load->nodes);
  const auto refuse = [&] {
    tree_.lock_host(*last, false);
    tree_.unlock(last);
    return false;
  };
  if (load->tokens < std::max<std::uint32_t>(1, settings_.load_back_threshold)) return refuse();
  make_room(avail, load->tokens);
  if (avail < load->tokens) return refuse();
  avail -= load->tokens;
  for (RadixNode* const node : load->nodes) {
    tree_.restore(*node);
    node->load = load.get();
  }
  totals_.loaded += load->tokens;
  ++totals_.loads;
  queued_loads_.push_back(std::move(load));
  ++num_loads_;
  return true;
}

void HostCache::submit_loads() {
  if (queued_loads_.empty()) return;
  std::uint64_t tokens = 0;
  for (const auto& load : queued_loads_) tokens += load->tokens;
  loads_.push_back({transfers_.load_ready(tokens), std::exchange(queued_loads_, {})});
  submitted_loads_.push_back(tokens);
}

void HostCache::finish_load(const HostLoad& load) {
  RadixNode* const last = load.nodes.back();
  for (RadixNode* const node : load.nodes) node->load = nullptr;
  for (auto node = load.nodes.rbegin(); node != load.nodes.rend(); ++node) list_duplicate(**node);
  for (auto node = load.nodes.end() - load.host_locked; node != load.nodes.end(); ++node)
    tree_.lock_host(**node, false);
  tree_.unlock(last);
  --num_loads_;
}

void HostCache::poll() {
  submit_writes();
  const std::int64_t now = transfers_.now();
  for (; !writes_.empty() && writes_.front().ready <= now; writes_.pop_front()) {
    for (const auto& write : writes_.front().copies) finish_write(*write);
  }
  for (; !loads_.empty() && loads_.front().ready <= now; loads_.pop_front()) {
    for (const auto& load : loads_.front().copies) finish_load(*load);
  }
}

void HostCache::on_split(RadixNode& upper, RadixNode& lower) {
  // Inserts `upper` before `lower`; returns the number of nodes from `lower` to the end.
  const auto insert_upper = [&](std::vector<RadixNode*>& nodes) {
    const auto at = std::ranges::find(nodes, &lower);
    const auto left = static_cast<std::size_t>(nodes.end() - at);
    nodes.insert(at, &upper);
    return left;
  };
  upper.write = lower.write;
  upper.load = lower.load;
  if (lower.write != nullptr) insert_upper(lower.write->parts);
  // The upper part inherits the host lock of the node, so the end of the load releases both.
  if (lower.load != nullptr && insert_upper(lower.load->nodes) <= lower.load->host_locked) ++lower.load->host_locked;
  // During a copy the end of the copy lists the node.
  if (lower.device && lower.host && lower.write == nullptr && lower.load == nullptr) list_duplicate(upper);
}

// ── Eviction ──

void HostCache::make_room(std::int64_t& avail, std::int64_t tokens) {
  std::vector<const RadixNode*> kept;  // can neither be copied nor deleted now
  while (avail < tokens) {
    RadixNode* leaf = nullptr;
    for (const auto& [rank, node] : tree_.device_leaves()) {
      if (std::ranges::find(kept, node) != kept.end()) continue;
      leaf = node;
      break;
    }
    if (leaf == nullptr) return;
    const std::int64_t freed = evict_leaf(*leaf);
    if (freed == 0) kept.push_back(leaf);
    avail += freed;
  }
}

// Returns the freed tokens; 0: the node stays.
std::int64_t HostCache::evict_leaf(RadixNode& node) {
  const std::int64_t tokens = node.length();
  if (!node.host && writes_back() && !write_back(node)) {
    const std::int64_t freed = drop_with_descendants(node);
    totals_.dropped += static_cast<std::uint64_t>(freed);
    return freed;
  }
  if (node.host) {
    tree_.demote(node);
  } else {
    totals_.dropped += node.length();
    tree_.remove(node);
  }
  return tokens;
}

// Copies a node to the host and waits for it. False: the host is full.
bool HostCache::write_back(RadixNode& node) {
  if (!reserve(node.length())) return false;
  tree_.set_host(node, true);
  transfers_.wait_for_write(node.length());
  submitted_writes_.push_back(node.length());
  on_change_(node, true, RadixTier::Host);
  list_duplicate(node);
  return true;
}

// Deletes a device leaf that cannot be copied, after its descendants on the host: each after its own children, siblings
// in order. Returns the freed tokens; 0: a node is in use, so all stay.
std::uint32_t HostCache::drop_with_descendants(RadixNode& node) {
  std::vector<RadixNode*> below;  // in reverse
  std::vector<RadixNode*> stack{&node};
  while (!stack.empty()) {
    RadixNode* const at = stack.back();
    stack.pop_back();
    if (at->lock > 0 || at->host_lock > 0 || at->write != nullptr || at->load != nullptr) return 0;
    below.push_back(at);
    const auto first = static_cast<std::ptrdiff_t>(stack.size());
    for (const auto& [key, child] : at->children) stack.push_back(child);
    std::ranges::sort(stack.begin() + first, stack.end(), {}, &RadixNode::place);
  }
  const std::uint32_t tokens = node.length();
  for (auto at = below.rbegin(); at != below.rend(); ++at) {
    if (*at != &node) {
      avail_ += (*at)->length();
      totals_.evicted += (*at)->length();
    }
    tree_.remove(**at);
  }
  return tokens;
}

// Frees host memory; returns how much, which may be less than asked.
std::int64_t HostCache::evict_host(std::int64_t tokens) {
  std::int64_t freed = 0;
  for (const bool leaves : {false, true}) {
    if (writes_back() && freed < tokens) freed += evict_duplicates(tokens - freed, leaves);
  }
  while (freed < tokens && !tree_.host_leaves().empty()) {
    RadixNode& node = *tree_.host_leaves().begin()->second;
    freed += node.length();
    avail_ += node.length();
    tree_.remove(node);
  }
  totals_.evicted += static_cast<std::uint64_t>(freed);
  return freed;
}

std::int64_t HostCache::evict_duplicates(std::int64_t tokens, bool leaves) {
  std::int64_t freed = 0;
  for (auto at = duplicates_.begin(); at != duplicates_.end() && freed < tokens;) {
    RadixNode& node = *(at++)->second;
    if (!node.device || !node.host) {
      unlist(node);
      continue;
    }
    const bool is_leaf = node.lock == 0 && node.device_children == 0;
    if (node.write != nullptr || node.load != nullptr || node.host_lock > 0 || (is_leaf && !leaves)) continue;
    unlist(node);
    freed += node.length();
    avail_ += node.length();
    on_change_(node, false, RadixTier::Host);
    tree_.set_host(node, false);
  }
  return freed;
}

void HostCache::list_duplicate(RadixNode& node) {
  if (!writes_back() || node.duplicate_place != 0) return;
  node.duplicate_place = ++places_;
  duplicates_.emplace(places_, &node);
}

void HostCache::unlist(RadixNode& node) {
  duplicates_.erase(node.duplicate_place);
  node.duplicate_place = 0;
}

void HostCache::on_removed(RadixNode& node) {
  if (node.duplicate_place != 0) unlist(node);
}

void HostCache::check() const {
  std::int64_t held = 0;
  tree_.each([&](const RadixNode& node) { held += node.host ? node.length() : 0; });
  if (avail_ + held != static_cast<std::int64_t>(capacity_)) {
    throw Error(ErrorKind::InvariantViolated, "the host has ", avail_, " free tokens and ", held, " cached ones of ",
                capacity_);
  }
}

}  // namespace understudy
