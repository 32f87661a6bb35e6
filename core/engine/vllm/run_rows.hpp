// KV events of a pool of runs, as rows of an engine's event log.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/flat_map.hpp"
#include "base/huge_array.hpp"
#include "engine/announcer.hpp"
#include "engine/config.hpp"
#include "engine/vllm/kv/block_pool.hpp"
#include "events/event_truth.hpp"
#include "store/block_store.hpp"

namespace understudy {

// A row per block, as a block store writes them. Without readers of events it writes none. `host`: its pool 1 has the
// chunks of vLLM's offload, whose rows keep their place among the others; null: there is none.
class RunRows final : public EventSource, public Residency, private PoolListener {
 public:
  // `pool` and `host` outlive the rows.
  RunRows(const EngineConfig& config, BlockPool& pool, BlockStore* host);

  // Rows have whole identities: set those of the request before its blocks get names.
  bool wants_identities() const noexcept { return details_.size() > 0; }
  std::uint64_t operations() const noexcept { return pool_.operations() + looked_up_; }
  void set_identities(std::span<const BlockIdentity> blocks) noexcept { identities_ = blocks; }

  // Which of a chain's blocks are there.
  std::vector<bool> on_device(std::span<const BlockIdentity> blocks) const { return pool_.has_each(blocks); }

  // ── EventSource ──
  std::span<const EventRecord> unread() override {
    read_host();
    return rows_;
  }
  void clear() override { rows_.clear(); }
  void check() const override {}  // compared as `followed`
  const Residency* followed() const noexcept override { return this; }
  std::size_t prefix_length(std::span<const BlockIdentity> blocks) const override {
    return pool_.prefix_length(blocks);
  }

  // ── Residency: the pool, and the host ──
  std::size_t num_pools() const noexcept override { return host_ != nullptr ? 2 : 1; }
  Tier tier(std::size_t pool) const override { return pool == 0 ? Tier::G1 : Tier::G2; }
  std::size_t num_hashes() const override {
    const std::size_t below = host_ != nullptr ? host_->num_hashes() : 0;
    return below + (tracks_ ? names_.size() : pool_.contents().size());
  }
  void has_blocks(std::size_t pool, std::span<const BlockIdentity> blocks, bool* out) const override;
  std::vector<BlockIdentity> resident(std::size_t pool) const override;

 private:
  struct Detail {
    BlockIdentity identity;
    std::uint64_t generation = 0;  // of this name's present stay in the pool
  };

  void begin_call() override {
    read_host();
    starts_ = true;
  }
  void read_host();
  void stored(std::span<const SlotId> ids, std::span<const BlockName> names, std::uint32_t position) override;
  void copied(SlotId id, BlockName name, std::uint32_t position, SlotId earliest) override;
  void removed(SlotId id, BlockName name, std::uint8_t group, bool last) override;
  void add(EventKind kind, SlotId id, BlockName name, bool sole);

  BlockPool& pool_;
  BlockStore* const host_;
  const bool tracks_;          // config.check: `names_` is kept
  HugeArray<Detail> details_;  // by block; empty: rows have names alone
  std::span<const BlockIdentity> identities_;
  EventRecords rows_;
  FlatMap<bool> names_;
  mutable std::uint64_t looked_up_ = 0;      // blocks
  FlatMap<std::uint64_t> host_generations_;  // by name: the host counts its own
  std::uint64_t next_generation_ = 1;
  std::uint64_t next_id_ = 0;
  bool starts_ = true;
};

}  // namespace understudy
