// Decay of index entries that no event removes: after a time, or beyond a number per worker.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>
#include <vector>

#include "router/holder_sets.hpp"

namespace understudy {

// Keeps the time of the last store of each (block, holder), oldest first. Only decides; the index removes the blocks.
class Decay {
 public:
  struct Limits {
    std::int64_t ttl_ns = 0;              // 0: no limit
    std::uint64_t max_member_blocks = 0;  // of one member on all its tiers; 0: no limit
    bool any() const noexcept { return ttl_ns > 0 || max_member_blocks > 0; }
  };
  struct Due {
    std::uint64_t hash;
    Holder holder;
  };

  explicit Decay(Limits limits) : limits_(limits) {}

  void touch(std::uint64_t hash, Holder holder, std::int64_t now_ns);
  void forget(std::uint64_t hash, Holder holder);
  void forget_member(std::uint32_t member);
  // Takes the next entry to remove.
  std::optional<Due> take_due(std::int64_t now_ns);

  const Limits& limits() const noexcept { return limits_; }
  std::size_t bytes() const noexcept;

 private:
  struct Row {
    std::int64_t stored_ns;
    std::uint64_t hash;
    Holder holder;
    std::uint64_t stamp;
  };
  struct Key {
    std::uint64_t hash;
    Holder holder;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    std::size_t operator()(const Key& key) const noexcept {
      return static_cast<std::size_t>((key.hash ^ key.holder) * 0x9E3779B97F4A7C15u);
    }
  };
  struct Member {
    std::deque<Row> rows;  // rows with an outdated stamp are void
    std::uint64_t blocks = 0;
  };

  bool latest(const Row& row) const {
    const auto at = stamps_.find({row.hash, row.holder});
    return at != stamps_.end() && at->second == row.stamp;
  }

  Limits limits_;
  std::vector<Member> members_;
  std::unordered_map<Key, std::uint64_t, KeyHash> stamps_;
  std::uint64_t next_stamp_ = 0;
};

}  // namespace understudy
