// Immutable, shared runs of block identities, sliced without copying: the keys of lookups in a store.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "tokens/lineage_hash.hpp"

namespace understudy {

// An immutable sequence of block identities. Copies and slices share the storage. Sequence hash 0 means "not known" in
// a BlockIdentity, so the builders reject it as the hash of a block.
class Identities {
 public:
  Identities() = default;
  explicit Identities(std::vector<BlockIdentity> blocks);
  // Views the first `size` elements of storage whose owner never writes to them again.
  Identities(std::shared_ptr<const BlockIdentity> first, std::size_t size) noexcept
      : first_(std::move(first)), size_(size) {}

  // Chains local hashes as token blocks do; the first one follows `parent`, or is a root.
  static Identities from_local_hashes(std::span<const std::uint64_t> local_hashes,
                                      std::optional<BlockIdentity> parent = std::nullopt);

  // Uses sequence hashes unchanged; each is the parent of the next. `local_hashes` is absent (not known) or as long.
  // `parent_hash` is the block before the first one; a block at position 0 cannot have one.
  static Identities from_sequence_hashes(std::span<const std::uint64_t> sequence_hashes,
                                         std::optional<std::span<const std::uint64_t>> local_hashes = std::nullopt,
                                         std::optional<std::uint64_t> parent_hash = std::nullopt,
                                         std::uint32_t start_position = 0);

  // Leaves local hashes unknown; a parent hash is known where the previous element is the parent.
  static Identities from_lineage_hashes(std::span<const LineageHash> lineage_hashes);

  // Returns the same blocks, known to hold `block_size` tokens each.
  Identities with_block_size(std::size_t block_size) const {
    Identities out = *this;
    out.block_size_ = block_size;
    return out;
  }
  std::size_t block_size() const noexcept { return block_size_; }  // 0: not known (hashes without tokens)

  std::size_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  const BlockIdentity& operator[](std::size_t index) const noexcept { return first_.get()[index]; }
  std::span<const BlockIdentity> span() const noexcept { return {first_.get(), size_}; }

  // Blocks whose identity covers the `ahead` tokens behind them too, as far as `tokens` (all of the request, from its
  // first) has those.
  Identities hash_ahead(std::span<const std::uint32_t> tokens, std::uint32_t ahead) const;

  // Returns elements [start, stop) in O(1). Throws InvalidArgument when the range is reversed or outside.
  Identities slice(std::size_t start, std::size_t stop) const;
  Identities concat(const Identities& other) const;

  friend bool operator==(const Identities& a, const Identities& b) noexcept;

 private:
  std::shared_ptr<const BlockIdentity> first_;
  std::size_t size_ = 0;
  std::size_t block_size_ = 0;
};

// A growing list of identities with O(1) snapshots: elements that a snapshot can see are never rewritten; the list
// moves to new storage instead.
class IdentityBuffer {
 public:
  IdentityBuffer() = default;
  IdentityBuffer(const IdentityBuffer&) = delete;  // two writers of one storage
  IdentityBuffer& operator=(const IdentityBuffer&) = delete;
  IdentityBuffer(IdentityBuffer&&) noexcept = default;
  IdentityBuffer& operator=(IdentityBuffer&&) noexcept = default;

  std::size_t size() const noexcept { return size_; }
  const BlockIdentity& operator[](std::size_t index) const noexcept { return data_[index]; }
  std::span<const BlockIdentity> span() const noexcept { return {data_.get(), size_}; }

  // Reserves space for `more` elements; the only call here that can throw.
  void reserve_more(std::size_t more);
  // Needs space from reserve_more.
  void push_back(const BlockIdentity& block) noexcept { data_[size_++] = block; }
  void truncate(std::size_t size) noexcept { size_ = size; }
  Identities snapshot();

 private:
  std::shared_ptr<BlockIdentity[]> data_;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
  std::size_t seen_ = 0;  // length of the longest snapshot of data_
};

}  // namespace understudy
