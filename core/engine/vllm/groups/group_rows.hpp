// KV events of several cache groups, as rows of an engine's event log.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/flat_map.hpp"
#include "engine/announcer.hpp"
#include "engine/vllm/groups/grouped_backend.hpp"
#include "events/event_truth.hpp"

namespace understudy {

// A row per named block, at the unit of hashing. With `ranges`, the raw stream also has a Skipped row for every unit of
// an event that ends no named block. `host`: pool 1 has the chunks of vLLM's offload, or the blocks of a host tier, a
// row each; null: there is none.
class GroupRows final : public EventSource, public Residency {
 public:
  GroupRows(GroupedBackend& backend, bool ranges, BlockStore* host, bool has_tiers)
      : backend_(backend), ranges_(ranges), host_(host), has_tiers_(has_tiers) {}

  std::span<const EventRecord> unread() override;
  void clear() override { rows_.clear(); }
  void check() const override;

  // ── Residency: the keys of all groups ──
  std::size_t num_pools() const noexcept override { return host_ != nullptr ? 2 : 1; }
  Tier tier(std::size_t pool) const override { return pool == 0 ? Tier::G1 : Tier::G2; }
  std::size_t num_hashes() const override {
    return backend_.contents().size() + (host_ != nullptr ? host_->num_hashes() : 0);
  }
  void has_blocks(std::size_t pool, std::span<const BlockIdentity> blocks, bool* out) const override;
  std::vector<BlockIdentity> resident(std::size_t pool) const override;

 private:
  struct Held {
    std::uint32_t copies = 0;
    std::uint32_t position = 0;    // of the block's last unit
    std::uint64_t generation = 0;  // of the latest copy
  };
  static constexpr std::size_t kBatch = 32;  // keys whose places are read ahead

  void touch(const GroupEvent& event, std::size_t first) const;
  void add_stored(const GroupEvent& event);
  void add_removed(const GroupEvent& event);
  void add_host(std::span<const EventRecord> rows);
  void add_chunks(std::span<const EventRecord> rows);
  std::uint64_t host_key(const BlockIdentity& block) const;
  std::vector<std::uint64_t> host_keys() const;

  GroupedBackend& backend_;
  const bool ranges_;
  BlockStore* host_;
  const bool has_tiers_;
  std::uint64_t host_blocks_ = 0;  // or chunks, by the rows
  EventRecords rows_;
  FlatMap<Held> held_;  // by key
  std::uint64_t generation_ = 0;
};

}  // namespace understudy
