#include "engine/sglang/radix_events.hpp"

namespace understudy {

namespace {

constexpr std::uint64_t kPageSeed = 0x70616765ULL;

}  // namespace

void RadixEvents::add(const RadixNode& node, bool stored, RadixTier tier) {
  std::vector<const RadixNode*> path;
  for (const RadixNode* at = &node; at->parent != nullptr; at = at->parent) path.push_back(at);
  RadixEvent event;
  event.stored = stored;
  event.tier = tier;
  event.begin = node.begin;
  event.tokens = node.key;
  std::uint64_t hash = 0;
  for (auto at = path.rbegin(); at != path.rend(); ++at) {
    const RadixNode& here = **at;
    if (&here == &node) event.parent = hash;
    for (std::uint32_t page = 0; page < here.length(); page += page_) {
      hash = xxh3_64_pair(hash, here.key.hash(page, page + page_), kPageSeed);
      if (&here == &node) event.pages.push_back(hash);
    }
  }
  if (!queue_.empty()) {
    RadixEvent& last = queue_.back();
    const bool continues = stored && last.stored && event.begin > 0 && last.pages.back() == event.parent;
    if (last.tier == tier && (continues || (!stored && !last.stored))) {
      last.pages.insert(last.pages.end(), event.pages.begin(), event.pages.end());
      last.tokens.append_from(event.tokens, 0, event.tokens.size());
      return;
    }
  }
  queue_.push_back(std::move(event));
}

}  // namespace understudy
