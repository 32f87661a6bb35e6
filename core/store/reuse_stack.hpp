// Reuse depths of blocks in the order of their last use: one pass gives the hits of LRU caches of every size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "tokens/identities.hpp"

namespace understudy {

// Requests are served one after the other. An LRU cache of C blocks holds the C blocks at the top of this stack, so a
// block is a hit for every cache that is at least as large as its depth.
class ReuseStack {
 public:
  // Serves a request that holds `held` blocks at its end; `identities` are matchable by others, and it may hit its
  // first `readable` ones. Blocks are released last first, as vLLM does: a prefix outlives what follows it.
  void serve(std::span<const BlockIdentity> identities, std::size_t readable, std::size_t held);

  // For every block hit, in order: the smallest cache, in blocks, that would have had it.
  const std::vector<std::uint32_t>& depths() const noexcept { return depths_; }
  // Blocks that an unlimited cache would hold by now.
  std::size_t live() const noexcept { return live_; }

 private:
  // Marks places in the order of use: a bit each, with sums of 64 in a Fenwick tree.
  void mark(std::uint64_t place);
  void unmark(std::uint64_t place);
  std::size_t marked_before(std::uint64_t place) const;
  void add(std::uint64_t word, std::int64_t change);
  void make_room(std::size_t places);

  std::unordered_map<std::uint64_t, std::uint64_t> place_of_;  // sequence hash → place of its youngest copy
  std::vector<std::uint64_t> marks_;
  std::vector<std::int64_t> sums_;
  std::uint64_t next_place_ = 0;
  std::size_t live_ = 0;
  std::vector<std::uint32_t> depths_;
};

}  // namespace understudy
