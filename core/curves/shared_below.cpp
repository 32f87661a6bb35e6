#include "curves/shared_below.hpp"

#include <vector>

#include "base/errors.hpp"
#include "base/flat_map.hpp"
#include "tokens/xxh3.hpp"

namespace understudy {

namespace {

constexpr std::uint32_t kNoBlock = 0xFFFFFFFFu;

// Blocks in the order of their last use, in a list through an array.
class Recent {
 public:
  explicit Recent(std::uint64_t size) : size_(size) {}

  bool contains(std::uint32_t block) const noexcept { return place_.contains(key(block)); }
  // Makes `block` the most recently used. Returns the block that it evicts, or kNoBlock.
  std::uint32_t use(std::uint32_t block) {
    if (size_ == 0) return block;
    if (const std::uint32_t* at = place_.find(key(block))) {
      unlink(*at);
      link(*at);
      return kNoBlock;
    }
    std::uint32_t evicted = kNoBlock;
    if (used_ == size_) {
      evicted = entries_[oldest_].block;
      erase(evicted);
    }
    std::uint32_t at = static_cast<std::uint32_t>(entries_.size());
    if (empty_.empty()) {
      entries_.emplace_back();
    } else {
      at = empty_.back();
      empty_.pop_back();
    }
    entries_[at].block = block;
    place_[key(block)] = at;
    link(at);
    ++used_;
    return evicted;
  }
  void erase(std::uint32_t block) {
    const std::uint32_t* found = place_.find(key(block));
    if (found == nullptr) return;
    const std::uint32_t at = *found;
    unlink(at);
    empty_.push_back(at);
    place_.erase(key(block));
    --used_;
  }

 private:
  struct Entry {
    std::uint32_t block = kNoBlock;
    std::uint32_t newer = kNoBlock;
    std::uint32_t older = kNoBlock;
  };

  static std::uint64_t key(std::uint32_t block) noexcept { return xxh3_64_pair(block, 0, 1); }
  void link(std::uint32_t at) noexcept {
    entries_[at].newer = kNoBlock;
    entries_[at].older = newest_;
    (newest_ == kNoBlock ? oldest_ : entries_[newest_].newer) = at;
    newest_ = at;
  }
  void unlink(std::uint32_t at) noexcept {
    const Entry& entry = entries_[at];
    (entry.newer == kNoBlock ? newest_ : entries_[entry.newer].older) = entry.older;
    (entry.older == kNoBlock ? oldest_ : entries_[entry.older].newer) = entry.newer;
  }

  std::uint64_t size_;
  std::uint64_t used_ = 0;
  std::uint32_t newest_ = kNoBlock;
  std::uint32_t oldest_ = kNoBlock;
  std::vector<Entry> entries_;
  std::vector<std::uint32_t> empty_;
  FlatMap<std::uint32_t> place_;
};

}  // namespace

std::int64_t shared_below_hits(const BlockVisits& visits, std::span<const std::int64_t> rows,
                               std::span<const std::int32_t> caches, std::size_t warm_up, std::uint64_t own,
                               std::uint64_t below, BelowRule rule) {
  if (caches.size() != rows.size()) {
    throw Error(ErrorKind::InvalidArgument, "caches has ", caches.size(), " entries for ", rows.size(), " rows");
  }
  Recent shared(below);
  std::vector<Recent> workers;
  std::uint64_t hits = 0;
  for (std::size_t order = 0; order < rows.size(); ++order) {
    if (caches[order] < 0) throw Error(ErrorKind::InvalidArgument, "caches must not be negative, got ", caches[order]);
    const auto worker = static_cast<std::size_t>(caches[order]);
    while (workers.size() <= worker) workers.emplace_back(own);
    Recent& above = workers[worker];
    const auto row = static_cast<std::size_t>(rows[order]);
    const std::span<const std::uint32_t> blocks = visits.blocks_of(row);
    const std::size_t readable = visits.readable(row);
    std::size_t found = 0;
    while (found < readable && (above.contains(blocks[found]) || shared.contains(blocks[found]))) ++found;
    if (order >= warm_up) hits += visits.tokens_in(row, found);
    // A request releases its last block first, so that a prefix outlives what follows it.
    for (std::size_t i = blocks.size(); i > 0; --i) {
      const std::uint32_t block = blocks[i - 1];
      if (rule == BelowRule::Moves) shared.erase(block);
      const std::uint32_t evicted = above.use(block);
      if (rule == BelowRule::Copies) {
        shared.use(block);
      } else if (evicted != kNoBlock) {
        shared.use(evicted);
      }
    }
  }
  return static_cast<std::int64_t>(hits);
}

}  // namespace understudy
