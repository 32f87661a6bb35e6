// The blocks of one request under the native backend: vLLM's way, with copies of a hash side by side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/kvbm/kv_manager.hpp"

namespace understudy {

// Blocks in position order. A block is private until `finalize` marks its last token as computed. After a release (end
// or preemption) the lease is empty and can start over. Every call checks first and throws with nothing changed.
// (NativeBackend follows the same rules for the simulated engine; BlockStore implements the block operations of both.)
class BlockLease {
 public:
  explicit BlockLease(std::shared_ptr<KvManager> manager);  // WrongState unless the backend is native
  ~BlockLease();
  BlockLease(const BlockLease&) = delete;
  BlockLease& operator=(const BlockLease&) = delete;

  // Allocate blocks for the first `tokens` tokens. The first allocation may take `prefix`, resident leading blocks,
  // from the cache; the others are new. All or nothing.
  void allocate(std::size_t tokens, std::span<const BlockIdentity> prefix = {});
  // The first `tokens` tokens are computed: blocks that this completes become visible. `identities` name all
  // complete blocks, `token_ids` hold the tokens of those that become visible. How many do.
  std::size_t finalize(std::size_t tokens, std::span<const BlockIdentity> identities,
                       std::span<const Token> token_ids = {});
  // From the last block to the first, so that the leaf is the first to be evicted.
  void release();
  // Like release, but the blocks cannot be matched any more, including those that other leases reference.
  void discard();

  std::size_t allocated_tokens() const noexcept { return tokens_; }
  std::size_t visible_blocks() const noexcept { return visible_; }
  std::span<const SlotId> slots() const noexcept { return slots_; }
  const KvManager& manager() const noexcept { return *manager_; }

 private:
  std::shared_ptr<KvManager> manager_;
  std::vector<SlotId> slots_;
  std::size_t tokens_ = 0;
  std::size_t visible_ = 0;  // leading blocks that are registered
};

}  // namespace understudy
