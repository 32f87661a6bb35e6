// Invariants of the pool, each compared with a count over all blocks and keys.
#include <algorithm>

#include "base/errors.hpp"
#include "engine/vllm/groups/group_pool.hpp"

namespace understudy {

void GroupPool::check(std::uint64_t references) const {
  const auto require = [](bool holds, const auto&... what) {
    if (!holds) throw Error(ErrorKind::InvariantViolated, what...);
  };
  std::uint64_t counted = 0;
  std::size_t cached = 0;
  for (SlotId block = 0; block < num_blocks_; ++block) {
    const Block& b = blocks_[block];
    counted += b.references;
    if (b.references > 0) continue;
    require(b.keys != kNoKey, "block ", block, " has neither references nor a key");
    require(queued_at(b.place).block == block, "block ", block, " is cached and is not queued");
    ++cached;
  }
  const std::size_t free = empty_.size() + cached;
  counted -= empty_.size();
  require(counted == references, "requests hold ", references, " blocks, the pool counts ", counted);
  require(cached == num_cached_, cached, " blocks are cached, ", num_cached_, " are counted");
  const std::vector<SlotId> listed = free_head(num_blocks_ + 1);
  require(listed.size() == free, listed.size(), " blocks are listed as free, of ", free);
  for (std::size_t i = 0; i < listed.size(); ++i) {
    const Block& block = blocks_[listed[i]];
    const bool empty = i < empty_.size();
    require(block.references == (empty ? 1 : 0), "block ", listed[i], " is listed as free and has references");
    require((block.keys == kNoKey) == empty, "block ", listed[i], " is listed at the wrong end of the free list");
  }
  check_keys();
}

void GroupPool::check_keys() const {
  const auto require = [](bool holds, const auto&... what) {
    if (!holds) throw Error(ErrorKind::InvariantViolated, what...);
  };
  std::size_t keys = 0;
  Placed own;
  for (SlotId block = 0; block < num_blocks_; ++block) {
    require((blocks_[block].keys == kSeveral) == several_.contains(block), "block ", block,
            " has a list of keys, or lacks one");
    for (const Placed placed : keys_of(block, own)) {
      const std::uint32_t key = placed.key;
      require(block_of(key) == block, "key ", key, " of block ", block, " names block ", block_of(key));
      const KeyIndex::Entry found = index_.find(
          hash_of(key), [&](std::uint32_t first) { return is_equal(first, at(key).content, at(key).group); });
      require(found.place != kNone, "key ", key, " of block ", block, " is not indexed");
      require(found.place == placed.place, "key ", key, " of block ", block, " is in the index at another place");
      ++keys;
    }
  }
  require(keys == num_keys_, "blocks have ", keys, " keys, ", num_keys_, " are counted");
  require(more_keys_.size() - spare_.size() <= keys, spare_.size(), " keys are unused, of ", more_keys_.size());
  std::size_t indexed = 0;
  index_.for_each([&](std::uint32_t first) {
    std::uint32_t last = first;
    for (std::uint32_t key = first; key != kNone; last = key, key = at(key).next_equal, ++indexed) {
      require(std::ranges::count(keys_of(block_of(key), own), key, &Placed::key) == 1, "key ", key,
              " is indexed, and block ", block_of(key), " does not have it");
      require(is_equal(key, at(first).content, at(first).group), "key ", key, " is indexed as key ", first);
      require(key == first || at(key).previous_equal == last, "key ", key, " follows another one than key ", last);
    }
    require(at(first).previous_equal == last, "key ", last, " is not listed as the last one of key ", first);
  });
  require(indexed == num_keys_, indexed, " keys are indexed, of ", num_keys_);
}

}  // namespace understudy
