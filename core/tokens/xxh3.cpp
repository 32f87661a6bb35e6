#include "tokens/xxh3.hpp"

namespace understudy {
namespace {

using xxh3::avalanche;
using xxh3::fold_product;
using xxh3::kSecretWords;

using Byte = unsigned char;

// Known answers for derived secrets, which Python cannot reach.
constexpr std::uint64_t kKnownKey = 0x0123456789abcdef;
static_assert(xxh3_64_pair_with_secret(kKnownKey, kKnownKey, 0) == 0x28761a69e54c4229);
static_assert(xxh3_64_pair_with_secret(kKnownKey, kKnownKey, 1) == 0xeeedf6460fb2d1bb);
static_assert(xxh3_64_pair_with_secret(kKnownKey, kKnownKey, 2) == 0x84c93d55fd2cd8d7);
static_assert(xxh3_64_pair_with_secret(kKnownKey, kKnownKey, 3) == 0x1df2889a894e034b);

constexpr std::uint64_t kPrime32_1 = 0x9e3779b1;
constexpr std::uint64_t kPrime32_2 = 0x85ebca77;
constexpr std::uint64_t kPrime32_3 = 0xc2b2ae3d;
constexpr std::uint64_t kPrime64_1 = 0x9e3779b185ebca87;
constexpr std::uint64_t kPrime64_2 = 0xc2b2ae3d27d4eb4f;
constexpr std::uint64_t kPrime64_3 = 0x165667b19e3779f9;
constexpr std::uint64_t kPrime64_4 = 0x85ebca77c2b2ae63;
constexpr std::uint64_t kPrime64_5 = 0x27d4eb2f165667c5;

constexpr std::size_t kSecretBytes = 192;
constexpr std::size_t kLanes = 8;
constexpr std::size_t kStripeBytes = 64;
constexpr std::size_t kStripesPerRound = (kSecretBytes - kStripeBytes) / 8;
constexpr std::size_t kRoundBytes = kStripeBytes * kStripesPerRound;

// The secret as bytes, because some uses are not aligned to words.
constexpr auto kSecret = std::bit_cast<std::array<Byte, kSecretBytes>>(kSecretWords);

inline std::uint64_t read64(const Byte* p) noexcept {
  std::uint64_t x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline std::uint32_t read32(const Byte* p) noexcept {
  std::uint32_t x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline std::uint64_t avalanche_xxh64(std::uint64_t x) noexcept {
  x ^= x >> 33;
  x *= kPrime64_2;
  x ^= x >> 29;
  x *= kPrime64_3;
  return x ^ (x >> 32);
}

inline std::uint64_t hash_1_to_3(const Byte* in, std::size_t length, std::uint64_t seed) noexcept {
  const std::uint64_t packed = (std::uint64_t{in[0]} << 16) | (std::uint64_t{in[length / 2]} << 24) |
                               std::uint64_t{in[length - 1]} | (std::uint64_t{length} << 8);
  const std::uint64_t flip = std::uint64_t{read32(&kSecret[0]) ^ read32(&kSecret[4])} + seed;
  return avalanche_xxh64(packed ^ flip);
}

inline std::uint64_t hash_4_to_8(const Byte* in, std::size_t length, std::uint64_t seed) noexcept {
  seed ^= xxh3::byte_swap(seed & 0xffffffff);
  const std::uint64_t flip = (kSecretWords[1] ^ kSecretWords[2]) - seed;
  std::uint64_t x = (read32(in + length - 4) + (std::uint64_t{read32(in)} << 32)) ^ flip;
  x ^= std::rotl(x, 49) ^ std::rotl(x, 24);
  x *= 0x9fb21c651e98df25;
  x ^= (x >> 35) + length;
  x *= 0x9fb21c651e98df25;
  return x ^ (x >> 28);
}

inline std::uint64_t mix16(const Byte* in, const Byte* secret, std::uint64_t seed) noexcept {
  return fold_product(read64(in) ^ (read64(secret) + seed), read64(in + 8) ^ (read64(secret + 8) - seed));
}

// Mixes pairs of 16 bytes from both ends towards the middle.
inline std::uint64_t hash_17_to_128(const Byte* in, std::size_t length, std::uint64_t seed) noexcept {
  std::uint64_t acc = length * kPrime64_1;
  for (std::size_t pair = 0; pair <= (length - 1) / 32; ++pair) {
    acc += mix16(in + 16 * pair, &kSecret[32 * pair], seed);
    acc += mix16(in + length - 16 * (pair + 1), &kSecret[32 * pair + 16], seed);
  }
  return avalanche(acc);
}

inline std::uint64_t hash_129_to_240(const Byte* in, std::size_t length, std::uint64_t seed) noexcept {
  std::uint64_t acc = length * kPrime64_1;
  for (std::size_t i = 0; i < 8; ++i) acc += mix16(in + 16 * i, &kSecret[16 * i], seed);
  acc = avalanche(acc);
  for (std::size_t i = 8; i < length / 16; ++i) acc += mix16(in + 16 * i, &kSecret[16 * (i - 8) + 3], seed);
  acc += mix16(in + length - 16, &kSecret[136 - 17], seed);
  return avalanche(acc);
}

struct Accumulator {
  std::array<std::uint64_t, kLanes> lane = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                            kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};

  void add_stripe(const Byte* in, const Byte* secret) noexcept {
    std::array<std::uint64_t, kLanes> data;
    std::memcpy(data.data(), in, kStripeBytes);
    for (std::size_t i = 0; i < kLanes; ++i) {
      const std::uint64_t keyed = data[i] ^ read64(secret + 8 * i);
      lane[i] += data[i ^ 1] + (keyed & 0xffffffff) * (keyed >> 32);
    }
  }

  void scramble(const Byte* secret) noexcept {
    for (std::size_t i = 0; i < kLanes; ++i) {
      lane[i] = (lane[i] ^ (lane[i] >> 47) ^ read64(secret + 8 * i)) * kPrime32_1;
    }
  }

  std::uint64_t merge(const Byte* secret, std::uint64_t start) const noexcept {
    for (std::size_t i = 0; i < kLanes; i += 2) {
      start += fold_product(lane[i] ^ read64(secret + 8 * i), lane[i + 1] ^ read64(secret + 8 * i + 8));
    }
    return avalanche(start);
  }
};

std::uint64_t hash_long(const Byte* in, std::size_t length, std::uint64_t seed) noexcept {
  std::array<std::uint64_t, kSecretWords.size()> words;
  for (std::size_t i = 0; i < words.size(); i += 2) {
    words[i] = kSecretWords[i] + seed;
    words[i + 1] = kSecretWords[i + 1] - seed;
  }
  const auto secret = std::bit_cast<std::array<Byte, kSecretBytes>>(words);
  const Byte* const last_secret = &secret[kSecretBytes - kStripeBytes];

  Accumulator acc;
  const Byte* p = in;
  for (std::size_t rounds = (length - 1) / kRoundBytes; rounds > 0; --rounds, p += kRoundBytes) {
    for (std::size_t i = 0; i < kStripesPerRound; ++i) acc.add_stripe(p + kStripeBytes * i, &secret[8 * i]);
    acc.scramble(last_secret);
  }
  const std::size_t stripes = (length - 1) % kRoundBytes / kStripeBytes;
  for (std::size_t i = 0; i < stripes; ++i) acc.add_stripe(p + kStripeBytes * i, &secret[8 * i]);
  acc.add_stripe(in + length - kStripeBytes, last_secret - 7);
  return acc.merge(&secret[11], length * kPrime64_1);
}

}  // namespace

std::uint64_t xxh3_64(const void* data, std::size_t length, std::uint64_t seed) noexcept {
  const auto* in = static_cast<const Byte*>(data);
  if (length > 240) return hash_long(in, length, seed);
  if (length > 128) return hash_129_to_240(in, length, seed);
  if (length > 16) return hash_17_to_128(in, length, seed);
  if (length > 8) {
    return xxh3::hash_9_to_16(read64(in), read64(in + length - 8), length, xxh3::seeded_flip(seed));
  }
  if (length >= 4) return hash_4_to_8(in, length, seed);
  if (length > 0) return hash_1_to_3(in, length, seed);
  return avalanche_xxh64(seed ^ kSecretWords[7] ^ kSecretWords[8]);
}

}  // namespace understudy
