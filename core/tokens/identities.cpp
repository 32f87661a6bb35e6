#include "tokens/identities.hpp"

#include <algorithm>
#include <utility>

#include "tokens/xxh3.hpp"

namespace understudy {
namespace {

constexpr std::uint64_t kAheadSeed = 0x6168656164ULL;

// Positions start .. start + count - 1 must all fit into a lineage hash.
void check_positions(std::uint64_t start, std::uint64_t count) {
  constexpr std::uint64_t kPositions = std::uint64_t{LineageHash::kMaxPosition} + 1;
  if (start > kPositions || count > kPositions - start) {
    throw Error(ErrorKind::InvalidArgument, count, " blocks from position ", start,
                " on pass the largest block position ", LineageHash::kMaxPosition);
  }
}

template <typename... Name>
void check_known(std::uint64_t hash, const Name&... name) {
  if (hash == 0) {
    throw Error(ErrorKind::InvalidArgument, name...,
                " is the hash 0, which means \"not known\"; number or hash the blocks so that none is 0");
  }
}

}  // namespace

Identities::Identities(std::vector<BlockIdentity> blocks) : size_(blocks.size()) {
  const auto owner = std::make_shared<const std::vector<BlockIdentity>>(std::move(blocks));
  first_ = {owner, owner->data()};
}

Identities Identities::from_local_hashes(std::span<const std::uint64_t> local_hashes,
                                         std::optional<BlockIdentity> parent) {
  check_positions(parent ? std::uint64_t{parent->position()} + 1 : 0, local_hashes.size());
  std::vector<BlockIdentity> blocks;
  blocks.reserve(local_hashes.size());
  for (std::size_t i = 0; i < local_hashes.size(); ++i) {
    const std::uint64_t local = local_hashes[i];
    check_known(local, "local_hashes[", i, "]");
    if (parent) {
      parent = BlockIdentity{parent->lineage.extend(local), local, parent->sequence_hash()};
    } else {
      parent = BlockIdentity{LineageHash::make(local, false, 0, 0), local, 0};
    }
    blocks.push_back(*parent);
  }
  return Identities(std::move(blocks));
}

Identities Identities::from_sequence_hashes(std::span<const std::uint64_t> sequence_hashes,
                                            std::optional<std::span<const std::uint64_t>> local_hashes,
                                            std::optional<std::uint64_t> parent_hash, std::uint32_t start_position) {
  check_positions(start_position, sequence_hashes.size());
  if (local_hashes && local_hashes->size() != sequence_hashes.size()) {
    throw Error(ErrorKind::InvalidArgument, "local_hashes has ", local_hashes->size(),
                " elements, sequence_hashes has ", sequence_hashes.size(), "; give as many, or None");
  }
  if (parent_hash && start_position == 0) {
    throw Error(ErrorKind::InvalidArgument,
                "parent_hash is given, but start_position is 0 and a root has no parent; give the parent's "
                "position + 1");
  }
  if (parent_hash) check_known(*parent_hash, "parent_hash");
  std::vector<BlockIdentity> blocks;
  blocks.reserve(sequence_hashes.size());
  for (std::size_t i = 0; i < sequence_hashes.size(); ++i) {
    const std::uint64_t current = sequence_hashes[i];
    check_known(current, "sequence_hashes[", i, "]");
    const auto position = static_cast<std::uint32_t>(start_position + i);
    blocks.push_back({LineageHash::make(current, parent_hash.has_value(), parent_hash.value_or(0), position),
                      local_hashes ? (*local_hashes)[i] : 0, parent_hash.value_or(0)});
    parent_hash = current;
  }
  return Identities(std::move(blocks));
}

Identities Identities::from_lineage_hashes(std::span<const LineageHash> lineage_hashes) {
  std::vector<BlockIdentity> blocks;
  blocks.reserve(lineage_hashes.size());
  for (std::size_t i = 0; i < lineage_hashes.size(); ++i) {
    const LineageHash& lineage = lineage_hashes[i];
    check_known(lineage.current(), "lineage_hashes[", i, "]");
    const bool follows = i > 0 && lineage_hashes[i - 1].is_parent_of(lineage);
    blocks.push_back({lineage, 0, follows ? lineage_hashes[i - 1].current() : 0});
  }
  return Identities(std::move(blocks));
}

Identities Identities::hash_ahead(std::span<const std::uint32_t> tokens, std::uint32_t ahead) const {
  if (block_size_ == 0) throw Error(ErrorKind::InvalidArgument, "hash_ahead needs blocks that were made from tokens");
  const std::size_t most = tokens.size() < ahead ? 0 : (tokens.size() - ahead) / block_size_;
  std::vector<std::uint64_t> locals;
  for (std::size_t block = 0; block < std::min(most, size_); ++block) {
    std::uint64_t local = (*this)[block].local_hash;
    for (const std::uint32_t token : tokens.subspan((block + 1) * block_size_, ahead)) {
      local = xxh3_64_pair(local, token, kAheadSeed);
    }
    locals.push_back(local);
  }
  return from_local_hashes(locals).with_block_size(block_size_);
}

Identities Identities::slice(std::size_t start, std::size_t stop) const {
  if (start > stop || stop > size_) {
    throw Error(ErrorKind::InvalidArgument, "blocks ", start, " to ", stop, " do not lie inside ", size_, " blocks");
  }
  return Identities(std::shared_ptr<const BlockIdentity>(first_, first_.get() + start), stop - start)
      .with_block_size(block_size_);
}

Identities Identities::concat(const Identities& other) const {
  if (empty()) return other;
  if (other.empty()) return *this;
  if (block_size_ != 0 && other.block_size_ != 0 && block_size_ != other.block_size_) {
    throw Error(ErrorKind::InvalidArgument, "blocks of ", block_size_, " and of ", other.block_size_,
                " tokens do not go together");
  }
  std::vector<BlockIdentity> blocks;
  blocks.reserve(size_ + other.size_);
  blocks.insert(blocks.end(), span().begin(), span().end());
  blocks.insert(blocks.end(), other.span().begin(), other.span().end());
  return Identities(std::move(blocks)).with_block_size(block_size_ == other.block_size_ ? block_size_ : 0);
}

bool operator==(const Identities& a, const Identities& b) noexcept {
  return a.size_ == b.size_ && (a.first_ == b.first_ || std::equal(a.span().begin(), a.span().end(), b.span().begin()));
}

void IdentityBuffer::reserve_more(std::size_t more) {
  const std::size_t needed = size_ + more;
  // After a truncation the elements behind size_ may still be visible to a snapshot.
  if (needed <= capacity_ && size_ >= seen_) return;
  const std::size_t capacity = needed <= capacity_ ? capacity_ : std::max(needed, 2 * capacity_);
  auto data = std::make_shared<BlockIdentity[]>(capacity);
  std::copy_n(data_.get(), size_, data.get());
  data_ = std::move(data);
  capacity_ = capacity;
  seen_ = 0;
}

Identities IdentityBuffer::snapshot() {
  seen_ = std::max(seen_, size_);
  return {std::shared_ptr<const BlockIdentity>(data_, data_.get()), size_};
}

}  // namespace understudy
