// Queries of a prefix index.
#include <algorithm>
#include <array>
#include <bit>
#include <mutex>

#include "router/prefix_index.hpp"

namespace understudy {

// Walks down a prompt with the members that still hold all of it. A member is on one tier at a time, the fastest of the
// current block, and is counted when it leaves the tier: blocks with the same set cost nothing.
class PrefixIndex::Walk {
 public:
  Walk(const HolderSets& sets, std::size_t members, std::vector<std::uint32_t>& blocks)
      : sets_(sets), words_(members / 64 + 1), bits_(words_ * (2 * kTiers + 1)), since_(members), blocks_(blocks) {
    for (std::size_t i = 0; i < words_; ++i) alive()[i] = ~std::uint64_t{0};
  }

  // False: no member is left.
  bool step(SetId set) {
    if (set != set_) change(set);
    ++depth_;
    return left_ > 0;
  }
  std::size_t left() const noexcept { return left_; }
  void end() { change(0); }

 private:
  std::uint64_t* alive() noexcept { return bits_.data(); }
  std::uint64_t* now(std::size_t tier) noexcept { return bits_.data() + words_ * (1 + tier); }
  std::uint64_t* next(std::size_t tier) noexcept { return bits_.data() + words_ * (1 + kTiers + tier); }

  void change(SetId set) {
    set_ = set;
    std::fill(next(0), next(0) + words_ * kTiers, 0);
    if (set != 0) {
      for (const HolderSets::Chunk& chunk : sets_.chunks(set)) next(chunk.tier())[chunk.word()] = chunk.bits;
    }
    left_ = 0;
    for (std::size_t word = 0; word < words_; ++word) {
      std::uint64_t taken = 0;
      for (std::size_t tier = 0; tier < kTiers; ++tier) {
        std::uint64_t& mine = next(tier)[word];
        mine &= alive()[word] & ~taken;
        taken |= mine;
      }
      for (std::size_t tier = 0; tier < kTiers; ++tier) {
        for (std::uint64_t gone = now(tier)[word] & ~next(tier)[word]; gone != 0; gone &= gone - 1) {
          const std::size_t member = word * 64 + static_cast<std::size_t>(std::countr_zero(gone));
          blocks_[member * kTiers + tier] += depth_ - since_[member];
        }
      }
      for (std::size_t tier = 0; tier < kTiers; ++tier) {
        if (depth_ > 0) {
          for (std::uint64_t come = next(tier)[word] & ~now(tier)[word]; come != 0; come &= come - 1) {
            since_[word * 64 + static_cast<std::size_t>(std::countr_zero(come))] = depth_;
          }
        }
        now(tier)[word] = next(tier)[word];
      }
      alive()[word] = taken;
      left_ += static_cast<std::size_t>(std::popcount(taken));
    }
  }

  const HolderSets& sets_;
  std::size_t words_;
  std::vector<std::uint64_t> bits_;
  std::vector<std::uint32_t> since_;
  std::vector<std::uint32_t>& blocks_;
  SetId set_ = 0;
  std::uint32_t depth_ = 0;
  std::size_t left_ = 0;
};

void PrefixIndex::match_locked(std::span<const std::uint64_t> hashes, bool early_exit,
                               std::vector<std::uint32_t>& blocks) const {
  blocks.assign(members_.size() * kTiers, 0);
  Walk walk(sets_, members_.size(), blocks);
  std::array<const HolderTable::Bucket*, kAhead> warmed;
  for (std::size_t i = 0; i < std::min(hashes.size(), kAhead); ++i) warmed[i] = table_.warm(hashes[i]);
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    const SetId set = table_.find(hashes[i], warmed[i % kAhead]);
    if (i + kAhead < hashes.size()) warmed[i % kAhead] = table_.warm(hashes[i + kAhead]);
    if (set == 0 || !walk.step(set) || (early_exit && walk.left() <= 1)) break;
  }
  walk.end();
}

void PrefixIndex::match(std::span<const std::uint64_t> hashes, bool early_exit,
                        std::vector<std::uint32_t>& blocks) const {
  const std::shared_lock lock(mutex_);
  match_locked(hashes, early_exit, blocks);
}

Matches PrefixIndex::find(std::span<const std::uint64_t> hashes, bool early_exit) const {
  const std::shared_lock lock(mutex_);
  Matches out;
  match_locked(hashes, early_exit, out.blocks);
  out.members.reserve(members_.size());
  for (std::size_t number = 0; number < members_.size(); ++number) {
    if (!members_[number]) continue;
    const std::size_t row = out.members.size();
    if (row != number) std::copy_n(&out.blocks[number * kTiers], kTiers, &out.blocks[row * kTiers]);
    out.members.push_back(*members_[number]);
  }
  out.blocks.resize(out.members.size() * kTiers);
  return out;
}

bool PrefixIndex::holds(Member member, Tier tier, std::uint64_t hash) const {
  const std::shared_lock lock(mutex_);
  const HolderTable::Entry entry = table_.find(hash);
  return entry && sets_.contains(entry.set(), HolderSets::holder(member, column(tier)));
}

std::uint64_t PrefixIndex::blocks(Member member, Tier tier) const {
  const std::shared_lock lock(mutex_);
  return counts_.at(member)[column(tier)];
}

std::size_t PrefixIndex::num_blocks() const {
  const std::shared_lock lock(mutex_);
  return table_.size();
}

std::vector<WorkerRank> PrefixIndex::members() const {
  const std::shared_lock lock(mutex_);
  std::vector<WorkerRank> out;
  for (const auto& id : members_) {
    if (id) out.push_back(*id);
  }
  return out;
}

std::size_t PrefixIndex::bytes() const {
  const std::shared_lock lock(mutex_);
  return table_.bytes() + sets_.bytes() + decay_.bytes() +
         copies_.size() * (sizeof(Copy) + 2 * sizeof(std::uint64_t) + sizeof(void*));
}

}  // namespace understudy
