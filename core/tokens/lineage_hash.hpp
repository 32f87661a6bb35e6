// The 128-bit positional lineage hash (PLH): a block's content, position and parent.
#pragma once

#include <compare>
#include <cstdint>

#include "base/errors.hpp"
#include "tokens/xxh3.hpp"

namespace understudy {

using Token = std::uint32_t;
using SlotId = std::uint32_t;
inline constexpr SlotId kNoSlot = 0xFFFFFFFFu;

// Sequence hash of the block that follows `parent`. The seed is constant: the first block's hash includes the salt.
constexpr std::uint64_t chain_hash(std::uint64_t parent, std::uint64_t local_hash) noexcept {
  return xxh3_64_pair(parent, local_hash, 1337);
}

// mode(2) | position(8/16/24) | current sequence hash(64) | parent fragment(54/46/38), most significant first.
struct LineageHash {
  static constexpr std::uint32_t kMaxPosition = (1u << 24) - 1;

  std::uint64_t hi = 0;
  std::uint64_t lo = 0;

  // Width of the parent fragment in a block at `position`.
  static constexpr unsigned fragment_bits(std::uint32_t position) noexcept {
    return position < (1u << 8) ? 54u : position < (1u << 16) ? 46u : 38u;
  }

  // First position after those that keep `bits` of their parent.
  static constexpr std::uint32_t end_of_bits(unsigned bits) noexcept { return 1u << (62u - bits); }

  // Ignores `parent` (stores 0) when `has_parent` is false. Throws InvalidArgument past kMaxPosition.
  static LineageHash make(std::uint64_t current, bool has_parent, std::uint64_t parent, std::uint32_t position) {
    if (position > kMaxPosition) {
      throw Error(ErrorKind::InvalidArgument, "position ", position, " is past the largest block position ",
                  kMaxPosition);
    }
    return pack(current, has_parent ? parent : 0, position, fragment_bits(position));
  }
  // Packs without checks; `parent` is 0 for none, and `r` must be the width at `position`.
  static constexpr LineageHash pack(std::uint64_t current, std::uint64_t parent, std::uint32_t position,
                                    unsigned r) noexcept {
    const std::uint64_t mode = (54u - r) / 8;
    return {mode << 62 | std::uint64_t{position} << r | current >> (64u - r), (parent & mask(r)) | current << r};
  }

  // Reads 128 raw bits. Throws InvalidArgument when the mode does not match the position.
  static LineageHash from_raw(std::uint64_t hi, std::uint64_t lo) {
    const LineageHash out{hi, lo};
    if (out.mode() == 3 || fragment_bits(out.position()) != out.bits()) {
      throw Error(ErrorKind::InvalidArgument, "not a lineage hash: mode ", out.mode(), " with position ",
                  out.position(), "; it may stem from another layout");
    }
    return out;
  }

  // Returns the hash of the next block, whose content alone hashes to `local_hash`.
  LineageHash extend(std::uint64_t local_hash) const {
    return make(chain_hash(current(), local_hash), true, current(), position() + 1);
  }

  unsigned mode() const noexcept { return static_cast<unsigned>(hi >> 62); }
  unsigned bits() const noexcept { return mode() == 0 ? 54u : mode() == 1 ? 46u : 38u; }
  std::uint32_t position() const noexcept { return static_cast<std::uint32_t>((hi & mask(62)) >> bits()); }
  std::uint64_t current() const noexcept { return (lo >> bits()) | (hi << (64u - bits())); }
  std::uint64_t parent_fragment() const noexcept { return lo & mask(bits()); }

  // This block's hash as a child at `child_position` stores it: the child decides the width.
  std::uint64_t fragment_for_child(std::uint32_t child_position) const noexcept {
    return current() & mask(fragment_bits(child_position));
  }

  bool is_parent_of(const LineageHash& child) const noexcept {
    return child.position() == position() + 1 && child.parent_fragment() == fragment_for_child(child.position());
  }

  friend bool operator==(const LineageHash&, const LineageHash&) = default;
  // Orders by position, then current hash, then the raw value.
  friend std::strong_ordering operator<=>(const LineageHash& a, const LineageHash& b) noexcept {
    if (const auto order = a.position() <=> b.position(); order != 0) return order;
    if (const auto order = a.current() <=> b.current(); order != 0) return order;
    if (const auto order = a.hi <=> b.hi; order != 0) return order;
    return a.lo <=> b.lo;
  }

 private:
  static constexpr std::uint64_t mask(unsigned bits) noexcept { return (std::uint64_t{1} << bits) - 1; }
};

// Identity of a block's content. A root has no parent; in later blocks a parent hash of 0 means "not known".
struct BlockIdentity {
  LineageHash lineage;
  std::uint64_t local_hash = 0;   // content of this block alone; 0 when not known
  std::uint64_t parent_hash = 0;  // sequence hash of the previous block; 0 at a root or when not known

  std::uint64_t sequence_hash() const noexcept { return lineage.current(); }
  std::uint32_t position() const noexcept { return lineage.position(); }

  friend bool operator==(const BlockIdentity&, const BlockIdentity&) = default;
};
static_assert(sizeof(BlockIdentity) == 32);

}  // namespace understudy
