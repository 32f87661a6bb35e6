// Residence times of a sample of device blocks, like vLLM's kv_cache_metrics.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "slots/slot.hpp"
#include "tokens/xxh3.hpp"

namespace understudy {

// The stay of a block whose slot has a new owner.
struct BlockStay {
  static constexpr std::size_t kMostGaps = 3;

  std::int64_t lifetime_ns = 0;  // since it was handed out
  std::int64_t idle_ns = 0;      // since it was last found, or handed out
  std::array<std::int64_t, kMostGaps> gaps_ns{};
  std::size_t gaps = 0;  // between the last times that it was found
};

class BlockStays {
 public:
  // `sample`: the share of blocks that are followed.
  explicit BlockStays(double sample) : sample_(sample) {}

  // The slots have a new owner. `told`: record the stay of the previous one.
  void handed_out(std::span<const SlotId> slots, std::int64_t now_ns, bool told) {
    for (const SlotId slot : slots) {
      if (const auto known = lives_.find(slot); known != lives_.end()) {
        if (told) records_.push_back(known->second.record(now_ns));
        lives_.erase(known);
      }
      if (draw() < sample_) lives_.emplace(slot, Life{now_ns, now_ns});
    }
  }

  // A request found them.
  void found(std::span<const SlotId> slots, std::int64_t now_ns) {
    if (lives_.empty()) return;
    for (const SlotId slot : slots) {
      if (const auto known = lives_.find(slot); known != lives_.end()) known->second.found(now_ns);
    }
  }

  std::vector<BlockStay> take() noexcept { return std::exchange(records_, {}); }

 private:
  struct Life {
    std::int64_t born_ns;
    std::int64_t last_ns;
    std::array<std::int64_t, BlockStay::kMostGaps> gaps_ns{};  // the last ones, oldest first
    std::size_t times = 0;                                     // number of hits

    void found(std::int64_t now_ns) noexcept {
      if (times > 0) {
        if (times > gaps_ns.size()) {
          gaps_ns = {gaps_ns[1], gaps_ns[2], now_ns - last_ns};
        } else {
          gaps_ns[times - 1] = now_ns - last_ns;
        }
      }
      ++times;
      last_ns = now_ns;
    }

    BlockStay record(std::int64_t now_ns) const noexcept {
      const std::size_t gaps = times == 0 ? 0 : times - 1;
      return {now_ns - born_ns, now_ns - last_ns, gaps_ns, gaps < gaps_ns.size() ? gaps : gaps_ns.size()};
    }
  };

  double draw() noexcept { return static_cast<double>(xxh3_64_pair(draws_++, 0, 0) >> 11) * 0x1.0p-53; }

  double sample_;
  std::uint64_t draws_ = 0;
  std::unordered_map<SlotId, Life> lives_;
  std::vector<BlockStay> records_;
};

}  // namespace understudy
