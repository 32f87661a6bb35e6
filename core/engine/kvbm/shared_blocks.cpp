#include "engine/kvbm/shared_blocks.hpp"

#include <algorithm>

namespace understudy {

std::uint64_t SharedBlocks::look(std::span<const BlockIdentity> blocks) {
  slots_.resize(blocks.size());
  holders_.resize(blocks.size());
  store_.peek(0, blocks, slots_.data(), holders_.data());
  return static_cast<std::uint64_t>(std::count(holders_.begin(), holders_.end(), 0u));
}

std::size_t SharedBlocks::missing() const noexcept {
  return static_cast<std::size_t>(std::count(slots_.begin(), slots_.end(), kNoSlot));
}

void SharedBlocks::hold(std::span<const BlockIdentity> blocks) {
  held_.clear();
  unheld_.clear();
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (holders_[i] > 0) {
      held_.push_back(slots_[i]);
    } else {
      unheld_.push_back(blocks[i]);
    }
  }
  matched_.resize(unheld_.size());
  store_.retain(0, held_);
  store_.match_scattered(0, unheld_, matched_.data());
}

void SharedBlocks::undo_hold() {
  held_ = slots_;
  std::erase(held_, kNoSlot);
  store_.release(0, held_, true);
}

std::size_t SharedBlocks::store(std::span<const BlockIdentity> blocks, std::span<SlotId> fresh,
                                std::span<const Token> tokens) {
  const std::size_t per_block = blocks.empty() ? 0 : tokens.size() / blocks.size();
  std::size_t used = 0;
  for (std::size_t at = 0; at < blocks.size();) {
    if (slots_[at] != kNoSlot) {
      ++at;
      continue;
    }
    const std::size_t first = at;
    while (at < blocks.size() && slots_[at] == kNoSlot) slots_[at++] = fresh[used++];
    store_.commit(0, std::span(slots_).subspan(first, at - first), blocks.subspan(first, at - first),
                  tokens.subspan(first * per_block, (at - first) * per_block));
  }
  return used;
}

void SharedBlocks::seal(SlotId& slot, const BlockIdentity& block, std::span<const Token> tokens) {
  const bool unheld = look({&block, 1}) > 0;
  if (slots_[0] == kNoSlot) {
    store_.commit(0, {&slot, 1}, {&block, 1}, tokens);
    return;
  }
  // An active block gains a reference; finding an inactive one counts as a use of it.
  if (unheld) {
    store_.match_scattered(0, {&block, 1}, slots_.data());
  } else {
    store_.retain(0, slots_);
  }
  store_.release(0, {&slot, 1});
  slot = slots_[0];
}

}  // namespace understudy
