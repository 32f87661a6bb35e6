#include "tokens/token_blocks.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include "tokens/xxh3.hpp"

namespace understudy {
namespace {

constexpr std::size_t kFrameBytes = 13;  // kind(1) | token or offset inside the run(4) | multimodal hash(8)

std::size_t checked_block_size(std::uint64_t block_size) {
  if (block_size < 1 || block_size > TokenBlocks::kMaxBlockSize) {
    throw Error(ErrorKind::InvalidArgument, "block_size is ", block_size, "; it must be 1 to ",
                TokenBlocks::kMaxBlockSize, " tokens");
  }
  return block_size;
}

// reserve() alone grows by exactly the requested amount, and would copy everything each time.
template <typename T>
void grow(std::vector<T>& items, std::size_t more) {
  const std::size_t needed = items.size() + more;
  if (needed > items.capacity()) items.reserve(std::max(needed, 2 * items.capacity()));
}

}  // namespace

std::uint64_t salt_hash(std::string_view salt, std::string_view lora) noexcept {
  std::uint64_t hash = kBaseSaltHash;
  if (!lora.empty()) hash += xxh3_64(lora.data(), lora.size(), 0);
  if (!salt.empty()) hash += xxh3_64(salt.data(), salt.size(), 1);
  return hash;
}

TokenBlocks::TokenBlocks(std::span<const Token> tokens, std::uint64_t block_size, std::uint64_t salt,
                         std::span<const MultimodalRun> runs)
    : block_size_(checked_block_size(block_size)), salt_(salt) {
  extend(tokens, runs);
}

std::optional<std::size_t> TokenBlocks::append(Token token) {
  check_room(1);
  reserve_more(1, 0);
  tokens_.push_back(token);
  const BlockRange sealed = seal_complete();
  return sealed.first < sealed.last ? std::optional(sealed.first) : std::nullopt;
}

BlockRange TokenBlocks::extend(std::span<const Token> tokens, std::span<const MultimodalRun> runs) {
  check_room(tokens.size());
  const std::vector<MultimodalRun> placed = placed_runs(runs, tokens.size());
  reserve_more(tokens.size(), placed.size());
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  runs_.insert(runs_.end(), placed.begin(), placed.end());
  return seal_complete();
}

void TokenBlocks::truncate(std::size_t length) noexcept {
  if (length >= tokens_.size()) return;
  tokens_.resize(length);
  blocks_.truncate(length / block_size_);
  while (!runs_.empty() && runs_.back().offset >= length) runs_.pop_back();
  if (!runs_.empty() && runs_.back().end() > length) runs_.back().length = length - runs_.back().offset;
}

std::optional<Token> TokenBlocks::pop() noexcept {
  if (tokens_.empty()) return std::nullopt;
  const Token last = tokens_.back();
  truncate(tokens_.size() - 1);
  return last;
}

std::span<const Token> TokenBlocks::tokens_at(std::size_t start, std::size_t stop) const noexcept {
  if (start >= stop || stop > tokens_.size()) return {};
  return tokens().subspan(start, stop - start);
}

// Checks runs against a chunk of `length` tokens; returns them sorted, with offsets into the whole sequence.
std::vector<MultimodalRun> TokenBlocks::placed_runs(std::span<const MultimodalRun> runs, std::uint64_t length) const {
  std::vector<MultimodalRun> placed(runs.begin(), runs.end());
  for (const MultimodalRun& run : placed) {
    if (run.length == 0) {
      throw Error(ErrorKind::InvalidArgument, "the multimodal run at offset ", run.offset, " is empty");
    }
    if (run.offset > std::numeric_limits<std::uint64_t>::max() - run.length || run.end() > length) {
      throw Error(ErrorKind::InvalidArgument, "the multimodal run at offset ", run.offset, " with length ", run.length,
                  " does not lie inside ", length, " tokens");
    }
  }
  std::sort(placed.begin(), placed.end(), [](const auto& a, const auto& b) { return a.offset < b.offset; });
  for (std::size_t i = 1; i < placed.size(); ++i) {
    if (placed[i].offset < placed[i - 1].end()) {
      throw Error(ErrorKind::InvalidArgument, "multimodal runs overlap at offset ", placed[i].offset);
    }
  }
  for (MultimodalRun& run : placed) run.offset += tokens_.size();
  return placed;
}

void TokenBlocks::check_room(std::uint64_t more) const {
  const std::uint64_t last_block_end = (std::uint64_t{LineageHash::kMaxPosition} + 1) * block_size_;
  const std::uint64_t limit = std::min(kMaxTokens, last_block_end);
  if (more > limit - tokens_.size()) {
    throw Error(ErrorKind::InvalidArgument, "cannot add ", more, " tokens to ", tokens_.size(),
                ": a sequence with block_size ", block_size_, " holds at most ", limit);
  }
}

// Does everything that can throw, before the first change.
void TokenBlocks::reserve_more(std::size_t more_tokens, std::size_t more_runs) {
  grow(tokens_, more_tokens);
  grow(runs_, more_runs);
  if (!runs_.empty() || more_runs > 0) frames_.resize(block_size_ * kFrameBytes);
  const std::size_t more_blocks = (tokens_.size() + more_tokens) / block_size_ - blocks_.size();
  if (more_blocks > 0) blocks_.reserve_more(more_blocks);
}

BlockRange TokenBlocks::seal_complete() noexcept {
  const BlockRange sealed{blocks_.size(), tokens_.size() / block_size_};
  std::uint64_t parent = sealed.first > 0 ? blocks_[sealed.first - 1].sequence_hash() : 0;
  for (std::size_t index = sealed.first; index < sealed.last; ++index) {
    const std::uint64_t local = block_hash(index);
    const std::uint64_t current = index > 0 ? chain_hash(parent, local) : local;
    blocks_.push_back(
        {LineageHash::make(current, index > 0, parent, static_cast<std::uint32_t>(index)), local, parent});
    parent = current;
  }
  return sealed;
}

std::uint64_t TokenBlocks::block_hash(std::size_t index) noexcept {
  const std::size_t start = index * block_size_;
  const auto first = std::partition_point(runs_.begin(), runs_.end(),
                                          [start](const MultimodalRun& run) { return run.end() <= start; });
  const auto last = std::find_if(first, runs_.end(),
                                 [end = start + block_size_](const MultimodalRun& run) { return run.offset >= end; });
  // A block without placeholders is hashed as plain text, so it keeps the identity of the same text.
  if (first == last) return xxh3_64(&tokens_[start], block_size_ * sizeof(Token), salt_);
  return framed_hash(start, {first, last});
}

std::uint64_t TokenBlocks::framed_hash(std::size_t start, std::span<const MultimodalRun> runs) noexcept {
  unsigned char* frame = frames_.data();
  for (std::size_t i = start; i < start + block_size_; ++i, frame += kFrameBytes) {
    while (!runs.empty() && runs.front().end() <= i) runs = runs.subspan(1);
    const bool placeholder = !runs.empty() && runs.front().offset <= i;
    const auto value = placeholder ? static_cast<std::uint32_t>(i - runs.front().offset) : tokens_[i];
    const std::uint64_t mm_hash = placeholder ? runs.front().mm_hash : 0;
    frame[0] = placeholder ? 1 : 0;
    std::memcpy(frame + 1, &value, sizeof value);
    std::memcpy(frame + 5, &mm_hash, sizeof mm_hash);
  }
  return xxh3_64(frames_.data(), frames_.size(), salt_);
}

}  // namespace understudy
