// Common part of the backends over a block store: names of blocks, and slots that tiers may have to free first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/kv_trace.hpp"
#include "engine/vllm/block_stays.hpp"
#include "engine/vllm/config.hpp"
#include "engine/vllm/kv_backend.hpp"
#include "store/block_store.hpp"

namespace understudy {

class BlockBackend : public KvBackend {
 public:
  // `tiers` may be null. Both outlive the backend.
  BlockBackend(const VllmConfig& config, BlockStore& store, WorkerTiers* tiers)
      : config_(config), store_(store), tiers_(tiers), order_(store.policy_kind(0)) {
    if (config.stay_sample > 0) stays_.emplace(config.stay_sample);
  }

  KvHit find(KvRequest& request, std::uint32_t limit) final;
  std::span<const SlotId> found(const KvHit& hit) const final {
    return {hits_.data(), hit.tokens / config_.block_size};
  }
  std::uint64_t beyond(const KvHit& hit, std::uint32_t tokens) const final {
    const std::uint64_t blocks = blocks_for(tokens);
    return blocks - std::min<std::uint64_t>(blocks, hit.tokens / config_.block_size);
  }
  Room add(KvRequest& request, std::int64_t now_ns) final { return take(request, 1, now_ns); }
  void name(KvRequest& request, std::uint32_t tokens) final { name_blocks(request, tokens / config_.block_size); }
  void need_names(KvRequest& request, std::uint32_t tokens) final {
    need_block_names(request, tokens / config_.block_size);
  }
  void trim(KvRequest& request, std::uint32_t tokens) final;
  void release(KvRequest& request) override;
  void release_table(KvTable table) final;
  void forget_cached() final { (void)store_.clear_inactive(0); }
  void reset() override;

  bool evicts_last() const noexcept final { return order_ != PolicyKind::VllmAppend && order_ != PolicyKind::Advised; }
  bool asks_user() const noexcept final { return order_ == PolicyKind::Advised; }

  std::uint64_t available() const final { return store_.available(0); }
  KvUsage usage() const final { return {store_.in(0, SlotState::Reset), store_.in(0, SlotState::Inactive)}; }
  std::uint64_t lacks(const KvRequest& request, std::uint64_t tokens) const final {
    const std::uint64_t blocks = blocks_for(tokens);
    return blocks - std::min<std::uint64_t>(blocks, request.table.size());
  }
  PoolMetrics metrics() const final { return store_.metrics(0); }
  std::vector<SlotId> free_head(std::size_t count) const final { return store_.eviction_order(0, count); }
  std::vector<std::uint64_t> contents() const final;
  std::uint32_t cached(std::span<const BlockIdentity> blocks) const final {
    return static_cast<std::uint32_t>(store_.prefix_length(0, blocks) * config_.block_size);
  }
  std::vector<TimedKvTrace> take_trace() noexcept final { return std::exchange(trace_, {}); }
  std::vector<BlockStay> take_stays() noexcept final { return stays_ ? stays_->take() : std::vector<BlockStay>{}; }

 protected:
  std::uint64_t blocks_for(std::uint64_t tokens) const noexcept {
    return (tokens + config_.block_size - 1) / config_.block_size;
  }
  virtual void name_blocks(KvRequest& request, std::uint32_t blocks) = 0;
  void need_block_names(KvRequest& request, std::size_t blocks);
  Room take(KvRequest& request, std::size_t count, std::int64_t now_ns);
  // All of `out`, or nothing has changed.
  Room take_slots(RequestSlot who, std::span<SlotId> out, std::int64_t now_ns);
  // The slots have a new owner: knowledge about their old content is invalid.
  virtual void handed_out(std::span<const SlotId>) {}
  // A request references the slots; others may reference them too.
  void note_found(std::span<const SlotId> slots, std::int64_t now_ns) {
    if (stays_) stays_->found(slots, now_ns);
  }

  const VllmConfig& config_;
  BlockStore& store_;
  WorkerTiers* const tiers_;

 private:
  void trace(std::size_t taken, std::uint64_t evictions_before, std::int64_t now_ns);

  const PolicyKind order_;    // in which blocks go
  std::vector<SlotId> hits_;  // slots of the last find
  std::vector<TimedKvTrace> trace_;
  std::optional<BlockStays> stays_;  // set when measured
};

}  // namespace understudy
