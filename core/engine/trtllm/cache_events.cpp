#include "engine/trtllm/cache_events.hpp"

#include <algorithm>

namespace understudy {

namespace {

std::uint64_t mix_token(std::uint64_t token, std::uint64_t seed) {
  auto value = static_cast<std::uint32_t>(token);
  value = ((value >> 16) ^ value) * 0x45d9f3bu;
  value = ((value >> 16) ^ value) * 0x45d9f3bu;
  value = ((value >> 16) ^ value) + 0x9e3779b9u;
  return seed ^ (value + (seed << 6) + (seed >> 2));
}

std::uint64_t mix_number(std::uint64_t value, std::uint64_t seed) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  value = value ^ (value >> 31);
  return seed ^ (value + 0x9e3779b9u + (seed << 6) + (seed >> 2));
}

const TrtScope& scope_of(const TrtNode& node) {
  const TrtNode* root = &node;
  while (!root->is_root && root->parent != nullptr) root = root->parent;
  return root->scope;
}

}  // namespace

TrtEvents::TrtEvents(const TrtLayout& layout, std::vector<std::uint64_t> blocks_by_level)
    : life_cycles_(layout.life_cycles), open_stored_(layout.life_cycles.size()) {
  for (std::size_t i = 0; i < life_cycles_.size(); ++i) add(TrtEvent::Kind::Created, i).numbers = blocks_by_level;
}

std::uint64_t TrtEvents::hash_of(const TokenList& tokens, const TrtNode& parent) const {
  const TrtScope& scope = scope_of(parent);
  std::uint64_t seed = tokens.size() ^ (parent.hash * 0xbf58476d1ce4e5b9u);
  if (parent.hash == 0 && scope.has_salt) seed = mix_number(scope.salt, seed);
  tokens.each(0, tokens.size(), [&seed](TokenSpan run) {
    for (std::uint32_t i = 0; i < run.count; ++i) seed = mix_token(run.first + i, seed);
  });
  if (scope.adapter > 0) seed = mix_number(scope.adapter, seed);
  return seed;
}

TrtEvent& TrtEvents::add(TrtEvent::Kind kind, std::size_t life_cycle) {
  if (kind != TrtEvent::Kind::Removed) close_all_removed();
  TrtEvent& event = pending_.emplace_back();
  event.kind = kind;
  event.id = next_id_++;
  event.group = static_cast<std::uint32_t>(life_cycle);
  event.window = life_cycles_[life_cycle].shown_window;
  if (kind != TrtEvent::Kind::Stored) open_stored_[life_cycle].reset();
  return event;
}

// ── Stored ──

void TrtEvents::stored(const TrtNode& node) {
  Announced state{node.hash, 0};
  for (std::size_t i = 0; i < life_cycles_.size(); ++i) {
    if (node.pages[i] != nullptr && node.covered(i) >= node.tokens.size()) state.life_cycles |= 1u << i;
  }
  if (state.life_cycles == 0) return;
  announced_[node.key] = state;
  for (std::size_t i = 0; i < life_cycles_.size(); ++i) {
    if ((state.life_cycles >> i & 1) != 0) announce(node, i);
  }
}

void TrtEvents::stored_of(const TrtNode& node, std::size_t life_cycle) {
  const auto found = announced_.find(node.key);
  if (found == announced_.end()) return stored(node);
  const std::uint32_t bit = 1u << life_cycle;
  if ((found->second.life_cycles & bit) != 0 || node.covered(life_cycle) < node.tokens.size()) return;
  found->second.life_cycles |= bit;
  announce(node, life_cycle);
}

void TrtEvents::announce(const TrtNode& node, std::size_t life_cycle) {
  close_removed(life_cycle);
  TrtEvent::Block block{node.hash, node.tokens, node.pages[life_cycle]->level};
  std::optional<std::uint64_t> parent;
  if (node.parent != nullptr && !node.parent->is_root) parent = node.parent->hash;
  if (const auto open = open_stored_[life_cycle]; open && open_removed_.empty()) {
    TrtEvent& event = pending_[*open];
    if (parent && event.blocks.back().hash == *parent) return event.blocks.push_back(std::move(block));
  }
  TrtEvent& event = add(TrtEvent::Kind::Stored, life_cycle);
  event.parent = parent;
  event.scope = scope_of(node);
  event.blocks.push_back(std::move(block));
  open_stored_[life_cycle] = pending_.size() - 1;
}

// ── Removed ──

void TrtEvents::removed(std::span<const std::uint64_t> keys) {
  std::vector<std::vector<std::uint64_t>> hashes(life_cycles_.size());
  for (const std::uint64_t key : keys) {
    const auto found = announced_.find(key);
    if (found == announced_.end()) continue;
    for (std::size_t i = 0; i < life_cycles_.size(); ++i) {
      if ((found->second.life_cycles >> i & 1) != 0) hashes[i].push_back(found->second.hash);
    }
    announced_.erase(found);
  }
  for (std::size_t i = 0; i < life_cycles_.size(); ++i) {
    for (const std::uint64_t hash : hashes[i]) announce_removed(i, hash);
  }
}

void TrtEvents::removed_of(std::uint64_t key, std::size_t life_cycle) {
  const auto found = announced_.find(key);
  const std::uint32_t bit = 1u << life_cycle;
  if (found == announced_.end() || (found->second.life_cycles & bit) == 0) return;
  const std::uint64_t hash = found->second.hash;
  found->second.life_cycles &= ~bit;
  if (found->second.life_cycles == 0) announced_.erase(found);
  announce_removed(life_cycle, hash);
}

void TrtEvents::announce_removed(std::size_t life_cycle, std::uint64_t hash) {
  const auto is = [life_cycle](const auto& open) { return open.first == life_cycle; };
  auto found = std::ranges::find_if(open_removed_, is);
  if (found == open_removed_.end()) found = open_removed_.insert(found, {life_cycle, {}});
  found->second.push_back(hash);
  open_stored_[life_cycle].reset();
}

void TrtEvents::close_removed(std::size_t life_cycle) {
  const auto is = [life_cycle](const auto& open) { return open.first == life_cycle; };
  const auto found = std::ranges::find_if(open_removed_, is);
  if (found == open_removed_.end()) return;
  std::vector<std::uint64_t> hashes = std::move(found->second);
  open_removed_.erase(found);
  add(TrtEvent::Kind::Removed, life_cycle).numbers = std::move(hashes);
}

void TrtEvents::close_all_removed() {
  while (!open_removed_.empty()) close_removed(open_removed_.front().first);
}

void TrtEvents::moved(std::uint64_t key, std::size_t life_cycle, std::size_t from, std::size_t to) {
  const auto found = announced_.find(key);
  if (found == announced_.end()) return;
  const std::uint64_t hash = found->second.hash;
  TrtEvent& event = add(TrtEvent::Kind::Updated, life_cycle);
  event.numbers = {hash};
  event.from = static_cast<std::uint8_t>(from);
  event.to = static_cast<std::uint8_t>(to);
}

std::vector<TrtEvent> TrtEvents::take() {
  close_all_removed();
  open_stored_.assign(life_cycles_.size(), std::nullopt);
  return std::exchange(pending_, {});
}

}  // namespace understudy
