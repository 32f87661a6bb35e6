// From a raw stream, which tells of every copy of a block, to the truth: Stored with the first copy on a tier, Removed
// with the last. It needs nothing but the stream.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>

#include "base/turn.hpp"
#include "events/wire_columns.hpp"

namespace understudy {

// Events of one publisher, as columns that somebody else holds.
struct ColumnsView {
  std::span<const std::uint8_t> kinds;
  std::span<const std::uint8_t> tiers;
  std::span<const std::uint64_t> parents;
  std::span<const std::int64_t> offsets;
  std::span<const std::uint64_t> sequence_hashes;
  std::span<const std::uint64_t> local_hashes;
};

// How far a reader that takes every Removed at its word is from the truth.
struct RawDistance {
  std::uint64_t blocks = 0;          // told of, in all
  std::uint64_t second_copies = 0;   // Stored of what was there
  std::uint64_t early_removals = 0;  // Removed while another copy stayed: what such a reader loses
  std::uint64_t unknown_removals = 0;
  std::uint64_t unnamed = 0;     // Stored by content, without a content or behind a parent that is not known: dropped
  std::uint64_t overflowed = 0;  // Stored beyond `max_blocks`: dropped
  std::uint64_t wrong_now = 0;   // blocks there that such a reader believes gone
  std::uint64_t wrong_peak = 0;
  std::uint64_t wrong_sum = 0;  // of wrong_now over all blocks told of
};

class Consolidator {
 public:
  // `by_content`: blocks are told under the sequence hash of their local hashes, which a router can compute from a
  // prompt, instead of the engine's own.
  Consolidator(std::size_t max_blocks, bool by_content) : max_blocks_(max_blocks), by_content_(by_content) {}

  // The truth that these events bring, which follow those of the calls before. The views must hold together.
  WireColumns apply(const ColumnsView& events);
  void clear() noexcept;

  const RawDistance& distance() const noexcept { return distance_; }
  std::size_t num_blocks() const noexcept { return live_; }
  Turns& turns() noexcept { return turns_; }

 private:
  struct Copies {
    std::uint64_t name = 0;  // that it is told under
    std::uint32_t count = 0;
    bool believed_gone = false;
  };

  // Of a block with that parent; 0 when there is none.
  std::uint64_t name(std::uint64_t hash, std::uint64_t local, std::uint64_t parent, std::uint64_t parent_name) const;
  std::uint64_t name_of(std::uint8_t tier, std::uint64_t hash) const;
  // `name` 0: it cannot be told. True: it is the first copy.
  bool arrives(std::uint8_t tier, std::uint64_t hash, std::uint64_t name);
  // The name of a block whose last copy left, else 0.
  std::uint64_t leaves(std::uint8_t tier, std::uint64_t hash);
  void count_row();

  std::size_t max_blocks_;
  bool by_content_;
  std::size_t live_ = 0;
  std::array<std::unordered_map<std::uint64_t, Copies>, 5> copies_;  // by tier
  RawDistance distance_;
  Turns turns_;
};

}  // namespace understudy
