// Converts a raw stream (an event per copy of a block) to a consolidated one: Stored with the first copy on a tier,
// Removed with the last. Needs only the stream.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>

#include "base/exclusive_call.hpp"
#include "events/wire_columns.hpp"

namespace understudy {

// Events of one publisher, as views of columns owned elsewhere.
struct ColumnsView {
  std::span<const std::uint8_t> kinds;
  std::span<const std::uint8_t> tiers;
  std::span<const std::uint64_t> parents;
  std::span<const std::int64_t> offsets;
  std::span<const std::uint64_t> sequence_hashes;
  std::span<const std::uint64_t> local_hashes;
};

// Errors of a reader that takes every Removed of the raw stream literally.
struct RawDistance {
  std::uint64_t blocks = 0;          // in all events
  std::uint64_t second_copies = 0;   // Stored for a block that was there
  std::uint64_t early_removals = 0;  // Removed while another copy stayed: such a reader loses the block
  std::uint64_t unknown_removals = 0;
  std::uint64_t unnamed = 0;     // Stored by content, with content and parent unknown on every tier: dropped
  std::uint64_t overflowed = 0;  // Stored beyond `max_blocks`: dropped
  std::uint64_t wrong_now = 0;   // resident blocks that such a reader believes gone
  std::uint64_t wrong_peak = 0;
  std::uint64_t wrong_sum = 0;  // of wrong_now, over all blocks
};

class Consolidator {
 public:
  // `by_content`: publishes blocks under the sequence hash of their local hashes, which a router can compute from a
  // prompt, instead of the engine's own hashes.
  Consolidator(std::size_t max_blocks, bool by_content) : max_blocks_(max_blocks), by_content_(by_content) {}

  // Returns the consolidated form of these events, which follow those of earlier calls. The views must be consistent.
  WireColumns apply(const ColumnsView& events);
  void clear() noexcept;

  const RawDistance& distance() const noexcept { return distance_; }
  std::size_t num_blocks() const noexcept { return live_; }
  CallFlag& call_flag() noexcept { return call_flag_; }

 private:
  struct Copies {
    std::uint64_t name = 0;  // published hash
    std::uint32_t count = 0;
    bool believed_gone = false;
  };

  // Name of a block with that parent; 0 when it is unknown. Only for blocks with a local hash, if names are content.
  std::uint64_t name(std::uint64_t hash, std::uint64_t local, std::uint64_t parent, std::uint64_t parent_name) const;
  std::uint64_t name_of(std::uint8_t tier, std::uint64_t hash) const;
  // True: first copy. `name` 0: the block cannot be published.
  bool arrives(std::uint8_t tier, std::uint64_t hash, std::uint64_t name);
  // Name of a block whose last copy left, else 0.
  std::uint64_t leaves(std::uint8_t tier, std::uint64_t hash);
  // Returns whether the tier has no other block of that name.
  bool forget_name(std::uint8_t tier, std::uint64_t name);
  void count_row();

  std::size_t max_blocks_;
  bool by_content_;
  std::size_t live_ = 0;
  std::array<std::unordered_map<std::uint64_t, Copies>, 5> copies_;  // by tier
  // By tier and name, if names are content: hashes that cover the next token differ for blocks of equal content.
  std::array<std::unordered_map<std::uint64_t, std::uint32_t>, 5> named_;
  RawDistance distance_;
  CallFlag call_flag_;
};

}  // namespace understudy
