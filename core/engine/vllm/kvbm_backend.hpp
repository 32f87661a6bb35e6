// An engine whose blocks are kvbm's.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/kvbm/shared_blocks.hpp"
#include "engine/vllm/block_backend.hpp"
#include "events/event_log.hpp"

namespace understudy {

class KvbmBackend final : public BlockBackend {
 public:
  // `log` receives rows of the store, or is null: under kvbm an allocation publishes stored blocks before removed ones.
  KvbmBackend(const VllmConfig& config, BlockStore& store, WorkerTiers* tiers, EngineEventLog* log)
      : BlockBackend(config, store, tiers), shared_(store), log_(log) {}

  std::uint64_t cost(KvRequest& request, const KvHit& hit, std::uint32_t tokens) override;
  Room place(KvRequest& request, const KvHit&, std::uint32_t tokens, std::uint32_t total,
             std::int64_t now_ns) override {
    return grow(request, tokens, total, now_ns);
  }
  Room grow(KvRequest& request, std::uint32_t tokens, std::uint32_t total, std::int64_t now_ns) override;
  void received(KvRequest& request, std::uint32_t computed) override;
  // Acquired blocks are matchable, computed or not, and other requests may reference them by now.
  void withdraw(KvRequest&, bool) override {}

  bool names_on_receipt() const noexcept override { return true; }

 private:
  void name_blocks(KvRequest& request, std::uint32_t blocks) override;
  std::uint32_t named_blocks(const KvRequest& request) const noexcept;
  std::span<const BlockIdentity> names_to_take(KvRequest& request, std::size_t blocks);

  SharedBlocks shared_;
  EngineEventLog* const log_;
  std::vector<SlotId> fresh_;  // scratch
};

}  // namespace understudy
