// KV events of a radix tree, as SGLang queues them: neighbours are joined.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "engine/sglang/radix_tree.hpp"

namespace understudy {

// Pages that were stored one behind the other, or removed together.
struct RadixEvent {
  bool stored = false;
  RadixTier tier = RadixTier::Device;
  std::vector<std::uint64_t> pages;  // hash of each page and everything before it
  std::uint64_t parent = 0;          // hash of the page before the first; 0: none
  std::uint32_t begin = 0;           // position of the first token
  TokenList tokens;                  // of all pages
};

class RadixEvents {
 public:
  explicit RadixEvents(std::uint32_t page_size) : page_(page_size) {}

  void add(const RadixNode& node, bool stored, RadixTier tier);
  std::vector<RadixEvent> take() { return std::exchange(queue_, {}); }

 private:
  const std::uint32_t page_;
  std::vector<RadixEvent> queue_;
};

}  // namespace understudy
