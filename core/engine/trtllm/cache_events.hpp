// KV cache events as TensorRT-LLM publishes them: joined while they wait, and published with the answers of a batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/trtllm/layout.hpp"
#include "engine/trtllm/page.hpp"

namespace understudy {

struct TrtEvent {
  enum class Kind : std::uint8_t { Created, Stored, Updated, Removed };
  struct Block {
    std::uint64_t hash = 0;
    TokenList tokens;
    std::uint8_t level = 0;
  };

  Kind kind = Kind::Created;
  std::uint64_t id = 0;
  std::uint32_t group = 0;  // life cycle
  std::uint32_t window = 0;
  std::optional<std::uint64_t> parent;
  TrtScope scope;                      // Stored
  std::vector<Block> blocks;           // Stored
  std::vector<std::uint64_t> numbers;  // Removed: hashes; Created: blocks of each level; Updated: one hash
  std::uint8_t from = 0;               // Updated: levels
  std::uint8_t to = 0;
};

class TrtEvents {
 public:
  TrtEvents(const TrtLayout& layout, std::vector<std::uint64_t> blocks_by_level);

  // The hash of a block behind `parent`: upstream's v1_block_key.
  std::uint64_t hash_of(const TokenList& tokens, const TrtNode& parent) const;

  void stored(const TrtNode& node);
  void stored_of(const TrtNode& node, std::size_t life_cycle);
  void removed(std::span<const std::uint64_t> keys);
  void removed_of(std::uint64_t key, std::size_t life_cycle);
  void moved(std::uint64_t key, std::size_t life_cycle, std::size_t from, std::size_t to);
  // The events since the last call.
  std::vector<TrtEvent> take();

 private:
  struct Announced {
    std::uint64_t hash = 0;
    std::uint32_t life_cycles = 0;  // bits
  };

  void announce(const TrtNode& node, std::size_t life_cycle);
  void announce_removed(std::size_t life_cycle, std::uint64_t hash);
  void close_removed(std::size_t life_cycle);
  void close_all_removed();
  TrtEvent& add(TrtEvent::Kind kind, std::size_t life_cycle);

  std::vector<TrtLifeCycle> life_cycles_;
  std::unordered_map<std::uint64_t, Announced> announced_;  // by key
  std::vector<TrtEvent> pending_;
  std::vector<std::optional<std::size_t>> open_stored_;                           // by life cycle: place in pending_
  std::vector<std::pair<std::size_t, std::vector<std::uint64_t>>> open_removed_;  // life cycles in order of opening
  std::uint64_t next_id_ = 0;
};

}  // namespace understudy
