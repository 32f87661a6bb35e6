// Blocks as vLLM keeps them, in a pool of runs: calls cost per run of blocks, and names are hashes alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "engine/vllm/config.hpp"
#include "engine/vllm/kv/block_pool.hpp"
#include "engine/vllm/kv_backend.hpp"
#include "engine/vllm/run_rows.hpp"

namespace understudy {

// Equal to NativeBackend in every answer. One group of full attention, in vLLM's own order; a connector may share its
// blocks, tiers below may not.
class RunBackend final : public KvBackend {
 public:
  // Whether it can serve an engine of this configuration, tiers below apart.
  static bool serves(const VllmConfig& config) noexcept;
  // `config` and `host` outlive the backend. `append_unnamed` as in BlockPool, `host` as in RunRows.
  RunBackend(const VllmConfig& config, bool append_unnamed, BlockStore* host);

  KvHit find(KvRequest& request, std::uint32_t limit) override;
  std::span<const SlotId> found(const KvHit&) const override { return {}; }  // for tiers
  std::uint64_t cost(KvRequest& request, const KvHit& hit, std::uint32_t tokens) override;
  std::uint64_t beyond(const KvHit& hit, std::uint32_t tokens) const override;
  Room place(KvRequest& request, const KvHit& hit, std::uint32_t tokens, std::uint32_t total,
             std::int64_t now_ns) override;
  std::uint64_t phantoms(const KvHit& hit) const override { return hit.tokens > 0 ? found_.phantoms : 0; }

  Room grow(KvRequest& request, std::uint32_t tokens, std::uint32_t total, std::int64_t now_ns) override;
  Room add(KvRequest& request, std::int64_t now_ns) override { return take(request, 1, now_ns); }
  void received(KvRequest& request, std::uint32_t computed) override { name_full(request, computed); }
  void name(KvRequest& request, std::uint32_t tokens) override { name_blocks(request, tokens / config_.block_size); }
  void need_names(KvRequest& request, std::uint32_t tokens) override {
    need_block_names(request, tokens / config_.block_size);
  }
  void trim(KvRequest& request, std::uint32_t tokens) override { pool_.trim(request.runs, blocks_for(tokens)); }
  void withdraw(KvRequest& request, bool keep_matchable) override;
  void release(KvRequest& request) override;
  std::size_t num_blocks(const KvRequest& request) const override { return request.runs.size(); }
  std::uint64_t hash_of(const KvRequest& request, std::size_t block) const override { return request.names[block]; }
  void release_table(KvTable table) override;
  void forget_cached() override { pool_.reset_prefix_cache(); }
  void reset() override { pool_.hand_out_cached(); }

  bool names_on_receipt() const noexcept override { return false; }
  bool evicts_last() const noexcept override { return !append_unnamed_; }
  bool asks_user() const noexcept override { return false; }

  std::uint64_t available() const override { return pool_.num_free(); }
  KvUsage usage() const override { return {pool_.counts().free, pool_.counts().cached}; }
  std::uint64_t lacks(const KvRequest& request, std::uint64_t tokens) const override;
  PoolMetrics metrics() const override;
  std::vector<SlotId> free_head(std::size_t count) const override { return pool_.free_head(count); }
  std::vector<std::uint64_t> contents() const override { return pool_.contents(); }
  std::uint32_t cached(std::span<const BlockIdentity> blocks) const override {
    return pool_.prefix_length(blocks) * config_.block_size;
  }
  void check_blocks() const override { pool_.check(); }
  std::uint64_t operations() const override { return rows_.operations(); }
  std::vector<TimedKvTrace> take_trace() noexcept override { return std::exchange(trace_, {}); }
  RunRows& rows() noexcept { return rows_; }
  const RunRows& rows() const noexcept { return rows_; }

 private:
  std::uint64_t blocks_for(std::uint64_t tokens) const noexcept {
    return (tokens + config_.block_size - 1) / config_.block_size;
  }
  void need_block_names(KvRequest& request, std::size_t blocks);
  Room take(KvRequest& request, std::size_t count, std::int64_t now_ns);
  void note_taken(std::size_t taken, std::uint64_t evictions_before, std::int64_t now_ns);
  void name_blocks(KvRequest& request, std::uint32_t blocks);
  void name_full(KvRequest& request, std::uint32_t tokens);

  const VllmConfig& config_;
  const bool append_unnamed_;
  const bool hashes_;  // names are sequence hashes
  BlockPool pool_;
  RunRows rows_;
  BlockPool::Hit found_;  // by the last find
  std::vector<TimedKvTrace> trace_;
};

}  // namespace understudy
