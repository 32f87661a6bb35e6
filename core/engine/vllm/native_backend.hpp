// Blocks as vLLM keeps them: copies of a hash live side by side, each found from the schedule of its last token on.
#pragma once

#include <cstdint>

#include "base/huge_array.hpp"
#include "engine/vllm/block_backend.hpp"

namespace understudy {

class NativeBackend final : public BlockBackend {
 public:
  using BlockBackend::BlockBackend;

  std::uint64_t cost(KvRequest& request, const KvHit& hit, std::uint32_t tokens) override;
  Room place(KvRequest& request, const KvHit& hit, std::uint32_t tokens, std::uint32_t total,
             std::int64_t now_ns) override;
  std::uint64_t phantoms(const KvHit& hit) const override;
  Room grow(KvRequest& request, std::uint32_t tokens, std::uint32_t total, std::int64_t now_ns) override;
  void received(KvRequest& request, std::uint32_t computed) override { name_full(request, computed); }
  void withdraw(KvRequest& request, bool keep_matchable) override;

  bool names_on_receipt() const noexcept override { return false; }

 private:
  void name_blocks(KvRequest& request, std::uint32_t blocks) override;
  void name_full(KvRequest& request, std::uint32_t tokens);
  void handed_out(std::span<const SlotId> slots) override;

  HugeArray<std::uint8_t> phantom_{0};  // slots named by an allocation that was undone; empty before the first
};

}  // namespace understudy
