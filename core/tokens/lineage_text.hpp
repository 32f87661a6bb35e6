// Text and byte forms of a lineage hash, and its older sibling, the positional sequence hash.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "tokens/lineage_hash.hpp"

namespace understudy {

using LineageBytes = std::array<unsigned char, 16>;

// Formats `position:current`, after a root `position:current:parent fragment`; hashes in base58 of 8 big-endian bytes.
std::string lineage_text(const LineageHash& lineage);

// 16 big-endian bytes, the wire form. Reading throws InvalidArgument for bits that are not a lineage hash.
LineageBytes lineage_to_bytes(const LineageHash& lineage) noexcept;
LineageHash lineage_from_bytes(const LineageBytes& bytes);

// A sequence hash with its position and the low bits of its local hash.
struct PositionalSequenceHash {
  static constexpr std::uint32_t kMaxPosition = (1u << 31) - 1;

  std::uint64_t hi = 0;  // mode(2) | position(8/16/24/31) | low bits of the local hash(54/46/38/31)
  std::uint64_t lo = 0;  // sequence hash

  // Throws InvalidArgument past kMaxPosition.
  static PositionalSequenceHash make(std::uint64_t sequence_hash, std::uint64_t local_hash, std::uint32_t position);
};

}  // namespace understudy
