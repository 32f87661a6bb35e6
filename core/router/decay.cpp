#include "router/decay.hpp"

#include <algorithm>

#include "base/assert.hpp"

namespace understudy {

void Decay::touch(std::uint64_t hash, Holder holder, std::int64_t now_ns) {
  const std::uint32_t index = HolderSets::member_of(holder);
  if (index >= members_.size()) members_.resize(index + 1);
  Member& member = members_[index];
  const auto [at, fresh] = stamps_.try_emplace({hash, holder}, 0);
  at->second = ++next_stamp_;
  if (fresh) ++member.blocks;
  member.rows.push_back({now_ns, hash, holder, next_stamp_});
  if (member.rows.size() > 2 * member.blocks + 64) {
    std::erase_if(member.rows, [this](const Row& row) { return !latest(row); });
  }
}

void Decay::forget(std::uint64_t hash, Holder holder) {
  if (stamps_.erase({hash, holder}) == 0) return;
  Member& member = members_[HolderSets::member_of(holder)];
  UNDERSTUDY_ASSERT(member.blocks > 0, "a member has lost count of its blocks");
  --member.blocks;
}

void Decay::forget_member(std::uint32_t index) {
  if (index >= members_.size()) return;
  for (const Row& row : members_[index].rows) stamps_.erase({row.hash, row.holder});
  members_[index] = {};
}

std::optional<Decay::Due> Decay::take_due(std::int64_t now_ns) {
  for (Member& member : members_) {
    while (!member.rows.empty()) {
      const Row row = member.rows.front();
      if (!latest(row)) {
        member.rows.pop_front();
        continue;
      }
      const bool old = limits_.ttl_ns > 0 && row.stored_ns + limits_.ttl_ns <= now_ns;
      const bool surplus = limits_.max_member_blocks > 0 && member.blocks > limits_.max_member_blocks;
      if (!old && !surplus) break;
      member.rows.pop_front();
      stamps_.erase({row.hash, row.holder});
      UNDERSTUDY_ASSERT(member.blocks > 0, "a member has lost count of its blocks");
      --member.blocks;
      return Due{row.hash, row.holder};
    }
  }
  return std::nullopt;
}

std::size_t Decay::bytes() const noexcept {
  std::size_t rows = 0;
  for (const Member& member : members_) rows += member.rows.size();
  return rows * sizeof(Row) + stamps_.size() * (sizeof(Key) + 2 * sizeof(std::uint64_t) + sizeof(void*));
}

}  // namespace understudy
