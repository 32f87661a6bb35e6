// XXH3-64 with seed, written from its public definition. All hashes in Understudy use it.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace understudy {

static_assert(std::endian::native == std::endian::little, "hashes are defined over little-endian bytes");

// XXH3-64 of `length` bytes at `data` (any alignment; `data` may be null when `length` is 0).
std::uint64_t xxh3_64(const void* data, std::size_t length, std::uint64_t seed = 0) noexcept;

namespace xxh3 {

__extension__ using Wide = unsigned __int128;

// The default 192-byte secret, as little-endian words.
inline constexpr std::array<std::uint64_t, 24> kSecretWords = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb,
    0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088,
    0x4ef90da297486471, 0xd8acdea946ef1938, 0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a,
    0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};

// The two words that a 16-byte input is mixed with.
struct Flip16 {
  std::uint64_t low;
  std::uint64_t high;
};

constexpr std::uint64_t fold_product(std::uint64_t a, std::uint64_t b) noexcept {
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

constexpr std::uint64_t byte_swap(std::uint64_t x) noexcept { return __builtin_bswap64(x); }

constexpr std::uint64_t avalanche(std::uint64_t x) noexcept {
  x ^= x >> 37;
  x *= 0x165667919e3779f9;
  return x ^ (x >> 32);
}

constexpr std::uint64_t hash_9_to_16(std::uint64_t first, std::uint64_t last, std::uint64_t length,
                                     Flip16 flip) noexcept {
  const std::uint64_t low = first ^ flip.low;
  const std::uint64_t high = last ^ flip.high;
  return avalanche(length + byte_swap(low) + high + fold_product(low, high));
}

constexpr Flip16 seeded_flip(std::uint64_t seed) noexcept {
  return {(kSecretWords[3] ^ kSecretWords[4]) + seed, (kSecretWords[5] ^ kSecretWords[6]) - seed};
}

// Flip of a secret derived from `seed` (+seed on even words, -seed on odd ones). Hashing with a derived secret equals
// hashing with the seed only for seed 0.
constexpr Flip16 secret_flip(std::uint64_t seed) noexcept {
  return {(kSecretWords[3] - seed) ^ (kSecretWords[4] + seed), (kSecretWords[5] - seed) ^ (kSecretWords[6] + seed)};
}

}  // namespace xxh3

// XXH3-64 of the 16 bytes LE64(first) || LE64(last): the chain step of sequence hashes.
constexpr std::uint64_t xxh3_64_pair(std::uint64_t first, std::uint64_t last, std::uint64_t seed) noexcept {
  return xxh3::hash_9_to_16(first, last, 16, xxh3::seeded_flip(seed));
}

// XXH3-64 of the same 16 bytes under the secret derived from `secret_seed`: a row of a frequency sketch.
constexpr std::uint64_t xxh3_64_pair_with_secret(std::uint64_t first, std::uint64_t last,
                                                 std::uint64_t secret_seed) noexcept {
  return xxh3::hash_9_to_16(first, last, 16, xxh3::secret_flip(secret_seed));
}

}  // namespace understudy
