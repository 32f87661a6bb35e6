// Map from keys to numbers: an entry has 16 bits of its key's hash, and the owner compares the keys.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "base/assert.hpp"
#include "base/huge_array.hpp"

namespace understudy {

// Hash table of buckets, one cache line each. Keys with one home go to one bucket, so that keys which are used one
// after another are read together. A full home sends new keys to the next bucket, then to buckets by their own hash. It
// counts them as its guests there, and a search continues past a bucket only while it has such guests with a matching
// bit. An entry keeps its place until the table grows.
class KeyIndex {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  static constexpr std::uint32_t kLanes = 8;  // entries of a bucket
  // Neighbouring keys that get one home. Few enough that a bucket has room for two such runs.
  static constexpr std::uint32_t kNeighbours = 4;

  struct Hash {
    std::uint32_t home;
    std::uint32_t own;
  };
  struct Entry {
    std::uint32_t place = kNone;
    std::uint32_t value = kNone;
  };

  KeyIndex() : buckets_(std::size_t{1} << kSmallest), shift_(32 - kSmallest) {}

  std::size_t size() const noexcept { return size_; }
  std::uint32_t value_at(std::uint32_t place) const noexcept { return bucket_of(place).values[place % kLanes]; }
  // Read the home of a key ahead of its use: in a loop of its own, so that many reads overlap. A prefetch would be
  // dropped where the address translation is not cached.
  void touch(std::uint32_t home) const noexcept {
    static_cast<void>(*static_cast<const volatile std::uint32_t*>(&buckets_[home >> shift_].guests));
  }
  // Read the bucket of an entry ahead of its use; kNone: none.
  void touch_place(std::uint32_t place) const noexcept {
    if (place != kNone) static_cast<void>(*static_cast<const volatile std::uint32_t*>(&bucket_of(place).guests));
  }
  // A number whose key most probably has that hash; kNone: none at its home.
  std::uint32_t guess(Hash hash) const noexcept {
    const Bucket& bucket = buckets_[hash.home >> shift_];
    const Lanes lanes(bucket, mark(hash));
    return lanes.empty() ? kNone : bucket.values[lanes.first()];
  }
  // The entry with that hash whose number `same` accepts.
  template <typename Same>
  Entry find(Hash hash, Same same) const noexcept {
    for (Path path(*this, hash);; path.advance()) {
      const Bucket& bucket = buckets_[path.at()];
      for (Lanes lanes(bucket, mark(hash)); !lanes.empty(); lanes.drop_first()) {
        const std::uint32_t value = bucket.values[lanes.first()];
        if (same(value)) return {place_of(path.at(), lanes.first()), value};
      }
      if ((bucket.guest_bits & guest_bit(hash)) == 0 || path.is_complete()) return {};
    }
  }
  // Whether the table must grow before it takes so many entries more.
  bool is_full(std::size_t more) const noexcept { return size_ + more > kLoad * buckets_.size(); }
  // Whether a search of any key with that home ends at once, and all its lanes are free.
  bool is_unused(std::uint32_t home) const noexcept {
    const Bucket& bucket = buckets_[home >> shift_];
    std::array<std::uint64_t, 2> words;
    std::memcpy(words.data(), bucket.marks.data(), sizeof words);
    return (words[0] | words[1] | bucket.guests) == 0;
  }
  // Add an entry in a free lane of an unused home; its place.
  std::uint32_t add(Hash hash, std::uint32_t lane, std::uint32_t value) noexcept {
    ++size_;
    return fill(hash.home >> shift_, lane, hash, value);
  }
  // The entry that `find` returns, whose key is shared from now on; if there is none, one for `value` is added, and
  // returned without a value.
  template <typename Same>
  Entry find_or_insert(Hash hash, std::uint32_t value, Same same) noexcept {
    const Bucket& home = buckets_[hash.home >> shift_];
    if (!Lanes(home, mark(hash)).empty() || (home.guest_bits & guest_bit(hash)) != 0) {
      const Entry found = find(hash, same);
      if (found.place != kNone) {
        bucket_of(found.place).shared |= bit(found.place);
        return found;
      }
    }
    ++size_;
    return {insert(hash, value), kNone};
  }
  // Erase a number that is at home or right behind it, and whose key is not shared. False: it is none.
  bool erase_simple(std::uint32_t place, std::uint32_t value) noexcept {
    Bucket& bucket = bucket_of(place);
    if (bucket.values[place % kLanes] != value || ((bucket.shared | bucket.far) & bit(place)) != 0) return false;
    if ((bucket.next & bit(place)) != 0) {
      pass_back(buckets_[(place / kLanes - 1) & (buckets_.size() - 1)]);
      bucket.next &= static_cast<std::uint8_t>(~bit(place));
    }
    bucket.marks[place % kLanes] = kFree;
    --size_;
    return true;
  }
  void replace(std::uint32_t place, std::uint32_t value) noexcept { bucket_of(place).values[place % kLanes] = value; }
  // Erase a number. `hash_of` gives the hash of a number.
  template <typename HashOf>
  void erase(std::uint32_t place, HashOf hash_of) noexcept {
    Bucket& bucket = bucket_of(place);
    if (((bucket.next | bucket.far) & bit(place)) != 0) {
      for (Path path(*this, hash_of(bucket.values[place % kLanes])); path.at() != place / kLanes; path.advance()) {
        pass_back(buckets_[path.at()]);
      }
    }
    const auto others = static_cast<std::uint8_t>(~bit(place));
    bucket.marks[place % kLanes] = kFree;
    bucket.shared &= others;
    bucket.next &= others;
    bucket.far &= others;
    --size_;
  }
  // Double the table. `moved(value, place)` reports the new place of each number.
  template <typename HashOf, typename Moved>
  void grow(HashOf hash_of, Moved moved) {
    HugeArray<Bucket> old(2 * buckets_.size());
    old.prefer_huge_pages(0, old.size());
    std::swap(old, buckets_);
    --shift_;
    for (std::size_t at = 0; at < old.size(); ++at) {
      for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
        if (old[at].marks[lane] == kFree) continue;
        const std::uint32_t value = old[at].values[lane];
        const std::uint32_t place = insert(hash_of(value), value);
        if ((old[at].shared >> lane & 1) != 0) bucket_of(place).shared |= bit(place);
        moved(value, place);
      }
    }
  }
  template <typename Visit>
  void for_each(Visit visit) const {
    for (std::size_t at = 0; at < buckets_.size(); ++at) {
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        if (buckets_[at].marks[lane] != kFree) visit(buckets_[at].values[lane]);
      }
    }
  }

 private:
  // Entries per bucket before the table grows; few, so that most keys are at home.
  static constexpr std::size_t kLoad = 3;
  static constexpr unsigned kSmallest = 4;  // log2 of the buckets
  static constexpr std::uint16_t kFree = 0;
  static constexpr std::uint16_t kUsed = 0x8000;  // in every mark

  struct alignas(64) Bucket {
    std::array<std::uint16_t, kLanes> marks;  // kFree, as in new memory, or bits of a hash
    std::array<std::uint32_t, kLanes> values;
    std::uint32_t guests;      // entries in other buckets whose search passes here
    std::uint32_t guest_bits;  // bits of their hashes; cleared with the last of them
    std::uint8_t shared;       // bit set of lanes whose key several numbers may have
    std::uint8_t next;         // bit set of lanes whose home is the bucket before
    std::uint8_t far;          // bit set of lanes whose home is yet another one
  };
  static_assert(sizeof(Bucket) == 64);

  // Some lanes of a bucket: those with one mark, all compared at once, or the free ones.
  class Lanes {
   public:
    Lanes(const Bucket& bucket, std::uint16_t mark) noexcept {
      Marks marks;
      std::memcpy(&marks, bucket.marks.data(), sizeof marks);
      // Spread in an integer: compilers spread 16 bits through memory, which waits for all stores before.
      const std::uint64_t spread = mark * kEach;
      const auto equal = marks == std::bit_cast<Marks>(Words{spread, spread});
      std::array<std::uint64_t, 2> words;
      std::memcpy(words.data(), &equal, sizeof words);
      lanes_ = (words[0] & kEach) | (words[1] & 2 * kEach);
    }
    static Lanes free(const Bucket& bucket) noexcept {
      std::array<std::uint64_t, 2> words;
      std::memcpy(words.data(), bucket.marks.data(), sizeof words);
      return Lanes((~words[0] >> 15 & kEach) | (~words[1] >> 14 & 2 * kEach));
    }
    bool empty() const noexcept { return lanes_ == 0; }
    std::uint32_t first() const noexcept {
      const auto bit = static_cast<std::uint32_t>(std::countr_zero(lanes_));
      return bit / 16 + bit % 16 * 4;
    }
    void drop_first() noexcept { lanes_ &= lanes_ - 1; }

   private:
    using Marks [[gnu::vector_size(2 * kLanes)]] = std::uint16_t;
    using Words [[gnu::vector_size(2 * kLanes)]] = std::uint64_t;
    static constexpr std::uint64_t kEach = 0x0001000100010001;

    explicit Lanes(std::uint64_t lanes) noexcept : lanes_(lanes) {}

    std::uint64_t lanes_;  // bit 16 i for lane i and bit 16 i + 1 for lane i + 4
  };

  // Buckets that a key may be in, in order.
  class Path {
   public:
    Path(const KeyIndex& index, Hash hash) noexcept : index_(index), own_(hash.own), at_(hash.home >> index.shift_) {}
    std::size_t at() const noexcept { return at_; }
    std::size_t passed() const noexcept { return passed_; }
    bool is_complete() const noexcept { return passed_ > index_.buckets_.size(); }  // all buckets were passed
    void advance() noexcept {
      at_ = ++passed_ == 2 ? own_ * kSpread >> index_.shift_ : (at_ + 1) & (index_.buckets_.size() - 1);
    }

   private:
    static constexpr std::uint32_t kSpread = 0x9E3779B1u;  // the low bits of the hash are the mark

    const KeyIndex& index_;
    std::uint32_t own_;
    std::size_t at_;
    std::size_t passed_ = 0;
  };

  static std::uint16_t mark(Hash hash) noexcept { return static_cast<std::uint16_t>(hash.own | kUsed); }
  static std::uint32_t guest_bit(Hash hash) noexcept { return 1u << (hash.own >> 27); }
  // One entry less was sent on from there.
  static void pass_back(Bucket& passed) noexcept {
    if (--passed.guests == 0) passed.guest_bits = 0;
  }
  static std::uint32_t place_of(std::size_t at, std::uint32_t lane) noexcept {
    return static_cast<std::uint32_t>(at) * kLanes + lane;
  }
  static std::uint8_t bit(std::uint32_t place) noexcept { return static_cast<std::uint8_t>(1u << place % kLanes); }
  Bucket& bucket_of(std::uint32_t place) noexcept { return buckets_[place / kLanes]; }
  const Bucket& bucket_of(std::uint32_t place) const noexcept { return buckets_[place / kLanes]; }
  std::uint32_t insert(Hash hash, std::uint32_t value) noexcept {
    const std::size_t home = hash.home >> shift_;
    const Lanes free = Lanes::free(buckets_[home]);
    if (free.empty()) return insert_away(hash, value);
    return fill(home, free.first(), hash, value);
  }
  [[gnu::noinline]] std::uint32_t insert_away(Hash hash, std::uint32_t value) noexcept {
    Path path(*this, hash);
    Lanes free = Lanes::free(buckets_[path.at()]);
    for (; free.empty(); free = Lanes::free(buckets_[path.at()])) {
      ++buckets_[path.at()].guests;
      buckets_[path.at()].guest_bits |= guest_bit(hash);
      path.advance();
    }
    const std::uint32_t place = fill(path.at(), free.first(), hash, value);
    (path.passed() == 1 ? bucket_of(place).next : bucket_of(place).far) |= bit(place);
    return place;
  }
  std::uint32_t fill(std::size_t at, std::uint32_t lane, Hash hash, std::uint32_t value) noexcept {
    buckets_[at].marks[lane] = mark(hash);
    buckets_[at].values[lane] = value;
    return place_of(at, lane);
  }

  HugeArray<Bucket> buckets_;  // a power of two
  unsigned shift_;
  std::size_t size_ = 0;
};

}  // namespace understudy
