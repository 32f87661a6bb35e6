#include "tokens/lineage_text.hpp"

#include <algorithm>

namespace understudy {
namespace {

std::string base58(std::uint64_t value) {
  constexpr char kDigits[] = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz";
  std::string text;
  for (std::uint64_t left = value; left > 0; left /= 58) text.push_back(kDigits[left % 58]);
  // A leading zero byte is a leading '1'.
  for (unsigned shift = 56; (value >> shift) == 0; shift -= 8) {
    text.push_back('1');
    if (shift == 0) break;
  }
  std::reverse(text.begin(), text.end());
  return text;
}

}  // namespace

std::string lineage_text(const LineageHash& lineage) {
  std::string text = std::to_string(lineage.position());
  text.append(1, ':').append(base58(lineage.current()));
  if (lineage.position() > 0) text.append(1, ':').append(base58(lineage.parent_fragment()));
  return text;
}

LineageBytes lineage_to_bytes(const LineageHash& lineage) noexcept {
  LineageBytes bytes;
  for (unsigned i = 0; i < 8; ++i) {
    bytes[i] = static_cast<unsigned char>(lineage.hi >> (56 - 8 * i));
    bytes[8 + i] = static_cast<unsigned char>(lineage.lo >> (56 - 8 * i));
  }
  return bytes;
}

LineageHash lineage_from_bytes(const LineageBytes& bytes) {
  std::uint64_t hi = 0;
  std::uint64_t lo = 0;
  for (unsigned i = 0; i < 8; ++i) {
    hi = hi << 8 | bytes[i];
    lo = lo << 8 | bytes[8 + i];
  }
  return LineageHash::from_raw(hi, lo);
}

PositionalSequenceHash PositionalSequenceHash::make(std::uint64_t sequence_hash, std::uint64_t local_hash,
                                                    std::uint32_t position) {
  if (position > kMaxPosition) {
    throw Error(ErrorKind::InvalidArgument, "position ", position, " is past the largest position ", kMaxPosition);
  }
  struct Layout {
    std::uint32_t mode;
    unsigned local_bits;
  };
  const Layout layout = position < (1u << 8)    ? Layout{0, 54}
                        : position < (1u << 16) ? Layout{1, 46}
                        : position < (1u << 24) ? Layout{2, 38}
                                                : Layout{3, 31};
  const std::uint64_t local = local_hash & ((std::uint64_t{1} << layout.local_bits) - 1);
  return {std::uint64_t{layout.mode} << 62 | std::uint64_t{position} << layout.local_bits | local, sequence_hash};
}

}  // namespace understudy
