// The blocks that each request of a workload reads and writes, as dense numbers: input of all cache curves.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "replay/workload_columns.hpp"
#include "tokens/lineage_hash.hpp"
#include "tokens/xxh3.hpp"

namespace understudy {

// Which blocks a request holds, and how many of them it may read from the cache.
enum class VisitRule : std::uint8_t {
  Engine,  // as vLLM: whole blocks of prompt and output; at least one prompt token is computed
  Ahead,  // the same, and a request that ends by itself has computed the KV of its last token, as with SGLang's overlap
  Prompts,  // prompts only; a partly filled last block counts with its tokens
};

// Row r visits blocks()[offsets[r] … offsets[r + 1]), first to last. A block is numbered after its parent.
class BlockVisits {
 public:
  // Throws InvalidArgument when there are 2^32 visits or more.
  BlockVisits(const WorkloadColumns& workload, std::uint32_t block_size, VisitRule rule);

  std::size_t rows() const noexcept { return readable_.size(); }
  std::size_t visits() const noexcept { return blocks_.size(); }
  std::uint32_t distinct() const noexcept { return static_cast<std::uint32_t>(hashes_.size()); }
  std::uint32_t block_size() const noexcept { return block_size_; }

  std::span<const std::uint32_t> blocks_of(std::size_t row) const noexcept {
    return {blocks_.data() + offsets_[row], offsets_[row + 1] - offsets_[row]};
  }
  // Number of leading blocks that a request may read from the cache; it computes the others.
  std::size_t readable(std::size_t row) const noexcept { return readable_[row]; }
  std::uint64_t prompt_tokens(std::size_t row) const noexcept { return prompt_tokens_[row]; }
  // Prompt tokens in the first `blocks` blocks.
  std::uint64_t tokens_in(std::size_t row, std::size_t blocks) const noexcept {
    return std::min(blocks * std::uint64_t{block_size_}, std::uint64_t{prompt_tokens_[row]});
  }
  // Sequence hash of a block; blocks that belong to one request alone have one of their own.
  std::uint64_t hash_of(std::uint32_t block) const noexcept {
    return hashes_[block] != 0 ? hashes_[block] : xxh3_64_pair(block, 0, ~std::uint64_t{0});
  }
  std::uint64_t visits_of(std::span<const std::int64_t> rows) const noexcept;

  // Throws InvalidArgument for a row that does not exist.
  void check_rows(std::span<const std::int64_t> rows) const;

 private:
  // The first `known` blocks are those of the row before.
  void append(std::span<const BlockIdentity> identities, std::size_t known, std::size_t held);
  std::uint32_t number_of(std::uint64_t hash, std::uint32_t parent);

  std::uint32_t block_size_;
  std::vector<std::uint64_t> offsets_{0};
  std::vector<std::uint32_t> blocks_;
  std::vector<std::uint32_t> readable_;
  std::vector<std::uint32_t> prompt_tokens_;
  std::vector<std::uint64_t> hashes_;  // sequence hash by number; 0: belongs to one request alone
  // Numbers of blocks that do not directly follow their parent's number, so only branches are searched here.
  std::unordered_map<std::uint64_t, std::uint32_t> branches_;
};

}  // namespace understudy
