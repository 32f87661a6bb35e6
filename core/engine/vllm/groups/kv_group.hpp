// KV cache groups of a model with several kinds of layers, and the sizes that follow from them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace understudy {

inline std::uint32_t ceil_div(std::uint64_t tokens, std::uint32_t block) noexcept {
  return static_cast<std::uint32_t>((tokens + block - 1) / block);
}

enum class GroupKind : std::uint8_t {
  Full,
  Mla,
  SlidingWindow,
  SlidingWindowMla,
  ChunkedLocal,
  State,  // Mamba, GDN, KDA
  Rswa,   // full attention whose decode keeps a window
  Circular,
};

struct KvGroup {
  GroupKind kind = GroupKind::Full;
  std::uint32_t block_size = 16;
  std::uint32_t window = 0;  // tokens; sliding kinds and Rswa
  std::uint32_t chunk = 0;   // tokens; ChunkedLocal
  bool align = true;         // State: blocks are cached at their ends; else (without caching) one block per request
  std::uint32_t checkpoint_blocks = 0;     // State: blocks for a state inside a chunk of the prompt
  std::uint32_t checkpoint_alignment = 1;  // State: tokens
  bool bounded_replay = false;             // SlidingWindowMla: the window's tokens are computed again after a hit

  friend bool operator==(const KvGroup&, const KvGroup&) = default;

  bool slides() const noexcept { return kind == GroupKind::SlidingWindow || kind == GroupKind::SlidingWindowMla; }
  bool full() const noexcept { return kind == GroupKind::Full || kind == GroupKind::Mla || kind == GroupKind::Rswa; }
  bool state() const noexcept { return kind == GroupKind::State && align; }
  bool cacheable() const noexcept { return kind != GroupKind::Circular && !bounded_replay; }
  // Blocks that a hit of a window needs.
  std::uint32_t window_blocks() const noexcept { return (window - 1 + block_size - 1) / block_size; }
  // Leading tokens that a token behind `tokens` tokens does not read.
  std::uint32_t skipped(std::uint32_t tokens) const noexcept {
    if (slides()) return tokens >= window ? tokens - window + 1 : 0;
    if (kind == GroupKind::ChunkedLocal) return tokens / chunk * chunk;
    if (state()) return tokens > 0 ? tokens - 1 : 0;
    return 0;
  }
  // The fewest tokens behind which the first `skipped` tokens, at least one, are not read.
  std::uint64_t tokens_to_skip(std::uint64_t skipped) const noexcept {
    if (slides()) return skipped + window - 1;
    if (kind == GroupKind::ChunkedLocal) return (skipped + chunk - 1) / chunk * chunk;
    return state() ? skipped + 1 : ~std::uint64_t{0};
  }
};

// Settings that the sizes depend on.
struct GroupSettings {
  std::vector<KvGroup> groups;
  bool caching = true;
  bool async_scheduling = false;
  std::uint32_t max_model_len = 0;
  std::uint32_t max_num_batched_tokens = 0;
  std::uint32_t prefix_match_unit = 0;                  // tokens; 0: follows from the groups
  std::optional<std::uint32_t> retention_interval = 0;  // tokens; none: every block is kept
};

// Sizes in tokens, as vLLM derives them.
struct GroupLayout {
  explicit GroupLayout(const GroupSettings& settings);  // ConfigError: groups that vLLM refuses

  std::vector<KvGroup> groups;
  std::uint32_t scheduler_block = 0;  // least common multiple of the block sizes
  std::uint32_t hash_block = 0;       // unit of hashing
  std::uint32_t hit_unit = 0;         // hits end at multiples of it
  std::uint32_t block = 0;            // smallest block of the cacheable groups
  bool partial_hits = false;          // hits may end inside a block
  std::optional<std::uint32_t> retention;
  std::uint64_t in_flight = 0;                     // most tokens scheduled and not yet received
  std::vector<std::optional<std::uint32_t>> caps;  // most blocks of a request, by group
  std::vector<std::vector<std::size_t>> kinds;     // groups with equal settings; full attention first
  std::uint32_t replay = 0;                        // tokens computed again after a hit
  bool caching = true;
  bool has_states = false;
  std::uint32_t max_model_len = 0;

  // The first group whose blocks are cached; the number of groups: none has.
  std::size_t first_cached() const noexcept {
    return static_cast<std::size_t>(std::ranges::find_if(groups, &KvGroup::cacheable) - groups.begin());
  }
  // Blocks that vLLM's start-up plans for a request of `tokens` tokens.
  std::uint64_t blocks_per_request(std::uint64_t tokens) const;
  // Tokens that this many blocks hold, in requests of max_model_len tokens.
  std::uint64_t capacity_tokens(std::uint64_t num_blocks) const;
  // Most blocks that a request of `tokens` tokens holds.
  std::uint64_t most_blocks(std::uint32_t tokens) const;
};

}  // namespace understudy
