// Invariants of the pool, each compared with a count over all blocks and keys.
#include <algorithm>

#include "base/errors.hpp"
#include "engine/vllm/groups/group_pool.hpp"

namespace understudy {

void GroupPool::check(std::uint64_t references) const {
  const auto require = [](bool holds, const auto&... what) {
    if (!holds) throw Error(ErrorKind::InvariantViolated, what...);
  };
  const std::vector<SlotId> listed = free_head(blocks_.size() + 1);
  require(listed.size() == num_free(), listed.size(), " blocks are listed as free, of ", num_free());
  for (std::size_t i = 0; i < listed.size(); ++i) {
    const Block& block = blocks_[listed[i]];
    require(block.references == 0, "block ", listed[i], " is listed as free and has references");
    require(block.keys.empty() == (i < empty_.size()), "block ", listed[i], " is at the wrong end of the free list");
  }
  std::uint64_t counted = 0;
  std::size_t unreferenced = 0;
  std::size_t keys = 0;
  for (SlotId block = 0; block < blocks_.size(); ++block) {
    counted += blocks_[block].references;
    unreferenced += blocks_[block].references == 0;
    keys += blocks_[block].keys.size();
    for (const Key& key : blocks_[block].keys) {
      const ShortList<SlotId>* const found = index_.find(key.name.hash());
      require(found != nullptr && std::ranges::count(found->span(), block) == 1, "a key of block ", block,
              " is not indexed once");
    }
  }
  require(counted == references, "requests hold ", references, " blocks, the pool counts ", counted);
  require(unreferenced == listed.size(), unreferenced, " blocks have no reference, ", listed.size(), " are listed");
  std::size_t indexed = 0;
  index_.for_each([&](std::uint64_t, const ShortList<SlotId>& blocks) { indexed += blocks.size(); });
  require(indexed == keys, indexed, " keys are indexed, of ", keys);
}

}  // namespace understudy
