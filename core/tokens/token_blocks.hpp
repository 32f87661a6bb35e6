// A request's tokens cut into blocks, with the identity of every complete block. All token hashing happens here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "tokens/identities.hpp"
#include "tokens/lineage_hash.hpp"

namespace understudy {

// Salt of a request without salt and LoRA; the router starts from the same number.
inline constexpr std::uint64_t kBaseSaltHash = 1337;

// Salt of a request: 1337 + h(lora, 0) + h(salt, 1), each term only when its string is not empty; wraps.
std::uint64_t salt_hash(std::string_view salt, std::string_view lora) noexcept;

// `length` placeholder positions from `offset` on for one multimodal object.
struct MultimodalRun {
  std::uint64_t mm_hash = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;

  std::uint64_t end() const noexcept { return offset + length; }
  friend bool operator==(const MultimodalRun&, const MultimodalRun&) = default;
};

// Blocks [first, last).
struct BlockRange {
  std::size_t first = 0;
  std::size_t last = 0;
};

// Every call checks its arguments first and throws InvalidArgument with nothing changed. Not thread-safe; its snapshots
// are. A span argument must not point into the object's own tokens.
class TokenBlocks {
 public:
  static constexpr std::uint64_t kMaxBlockSize = std::uint64_t{1} << 20;
  static constexpr std::uint64_t kMaxTokens = std::uint64_t{1} << 28;

  // Runs may come in any order, must lie inside the tokens and not overlap; tokens under a run are not hashed.
  TokenBlocks(std::span<const Token> tokens, std::uint64_t block_size, std::uint64_t salt = kBaseSaltHash,
              std::span<const MultimodalRun> runs = {});

  // Adds one token; returns the index of the block that it completed, if any.
  std::optional<std::size_t> append(Token token);
  // Adds tokens, with runs whose offsets count from the first of them; returns the completed blocks.
  BlockRange extend(std::span<const Token> tokens, std::span<const MultimodalRun> runs = {});

  // Keeps the first `length` tokens (all, when there are fewer) and trims the runs to them.
  void truncate(std::size_t length) noexcept;
  std::optional<Token> pop() noexcept;

  std::size_t size() const noexcept { return tokens_.size(); }
  std::size_t num_blocks() const noexcept { return blocks_.size(); }
  std::size_t block_size() const noexcept { return block_size_; }
  std::uint64_t salt() const noexcept { return salt_; }
  std::span<const MultimodalRun> runs() const noexcept { return runs_; }  // sorted by offset

  std::span<const Token> tokens() const noexcept { return tokens_; }
  // Returns tokens [start, stop); empty when the range is reversed or not inside the sequence.
  std::span<const Token> tokens_at(std::size_t start, std::size_t stop) const noexcept;

  // Identities of the complete blocks: a view valid until the next change, or an O(1) snapshot that stays valid.
  std::span<const BlockIdentity> blocks() const noexcept { return blocks_.span(); }
  Identities identities() { return blocks_.snapshot().with_block_size(block_size_); }

 private:
  std::vector<MultimodalRun> placed_runs(std::span<const MultimodalRun> runs, std::uint64_t length) const;
  void check_room(std::uint64_t more) const;
  void reserve_more(std::size_t more_tokens, std::size_t more_runs);
  BlockRange seal_complete() noexcept;
  std::uint64_t block_hash(std::size_t index) noexcept;
  std::uint64_t framed_hash(std::size_t start, std::span<const MultimodalRun> runs) noexcept;

  std::vector<Token> tokens_;
  IdentityBuffer blocks_;
  std::vector<MultimodalRun> runs_;
  std::vector<unsigned char> frames_;  // scratch for blocks under a run
  std::size_t block_size_;
  std::uint64_t salt_;
};

}  // namespace understudy
