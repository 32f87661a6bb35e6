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

// Hash table of buckets, one cache line each. Entries never move: a full bucket sends new ones to the next buckets and
// counts them as its guests there, and a search continues past a bucket only while it has such guests with a matching
// bit.
class KeyIndex {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  KeyIndex() : buckets_(std::size_t{1} << kSmallest), shift_(32 - kSmallest) {}

  std::size_t size() const noexcept { return size_; }
  // A tag, never 0. `salt` changes its low 16 bits, and not its bucket.
  static std::uint32_t tag(std::uint64_t key, std::uint32_t salt) noexcept {
    const auto bits = static_cast<std::uint32_t>((key * 0x9E3779B97F4A7C15u) >> 32) ^ (salt & kMarkBits);
    return bits | ((bits & kMarkBits) == kFree ? 1u : 0u);
  }
  // Read the bucket of a key ahead of its use: in a loop of its own, so that many reads overlap. A prefetch would be
  // dropped where the address translation is not cached.
  void touch(std::uint32_t tag) const noexcept {
    static_cast<void>(*static_cast<const volatile std::uint32_t*>(&buckets_[home_of(tag)].guests));
  }
  // A number whose key most probably has that tag; kNone: none in the key's own bucket.
  std::uint32_t guess(std::uint32_t tag) const noexcept {
    const Bucket& bucket = buckets_[home_of(tag)];
    const Lanes lanes(bucket, mark(tag));
    return lanes.empty() ? kNone : bucket.values[lanes.first()];
  }
  // The number of the tag that `same` accepts; kNone: none.
  template <typename Same>
  std::uint32_t find(std::uint32_t tag, Same same) const noexcept {
    for (std::size_t at = home_of(tag);; at = after(at)) {
      const Bucket& bucket = buckets_[at];
      for (Lanes lanes(bucket, mark(tag)); !lanes.empty(); lanes.drop_first()) {
        if (const std::uint32_t value = bucket.values[lanes.first()]; same(value)) return value;
      }
      if ((bucket.guest_bits & guest_bit(tag)) == 0) return kNone;
    }
  }
  // Return the number of the tag that `same` accepts, whose key is shared from now on; kNone: there was none, and
  // `value` is added. `tag_at` gives the tag of a number, for a larger table.
  template <typename Same, typename TagAt>
  std::uint32_t find_or_insert(std::uint32_t tag, std::uint32_t value, Same same, TagAt tag_at) {
    if (size_ >= kLoad * buckets_.size()) grow(tag_at);
    for (std::size_t at = home_of(tag);; at = after(at)) {
      Bucket& bucket = buckets_[at];
      for (Lanes lanes(bucket, mark(tag)); !lanes.empty(); lanes.drop_first()) {
        const std::size_t lane = lanes.first();
        if (!same(bucket.values[lane])) continue;
        bucket.shared |= 1u << lane;
        return bucket.values[lane];
      }
      if ((bucket.guest_bits & guest_bit(tag)) == 0) break;
    }
    place(tag, value, false);
    ++size_;
    return kNone;
  }
  // Erase a number unless its key may be shared. False: it may be, or the number is not there.
  bool erase_sole(std::uint32_t tag, std::uint32_t value) noexcept {
    std::size_t lane = 0;
    const std::size_t at = lane_of(tag, value, lane);
    if (at == buckets_.size() || (buckets_[at].shared >> lane & 1) != 0) return false;
    erase(tag, at, lane);
    return true;
  }
  // Replace a number by another one of the same key, or (kNone) erase it. False: the number is not there.
  bool replace(std::uint32_t tag, std::uint32_t value, std::uint32_t successor) noexcept {
    std::size_t lane = 0;
    const std::size_t at = lane_of(tag, value, lane);
    if (at == buckets_.size()) return false;
    if (successor == kNone) {
      erase(tag, at, lane);
    } else {
      buckets_[at].values[lane] = successor;
    }
    return true;
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
  static constexpr std::size_t kLanes = 8;
  // Entries per bucket before the table grows; few, because equal groups have all keys of a content in one bucket.
  static constexpr std::size_t kLoad = 3;
  static constexpr unsigned kSmallest = 4;  // log2 of the buckets
  static constexpr std::uint16_t kFree = 0;
  static constexpr std::uint32_t kMarkBits = 0xFFFF;

  struct alignas(64) Bucket {
    std::array<std::uint16_t, kLanes> marks;  // kFree, as in new memory, or bits of a tag
    std::array<std::uint32_t, kLanes> values;
    std::uint32_t guests;      // entries in later buckets whose search passes here
    std::uint32_t guest_bits;  // bits of their tags; cleared with the last of them
    std::uint32_t shared;      // bit set of lanes whose key several numbers may have
  };
  static_assert(sizeof(Bucket) == 64);

  // Lanes of a bucket with one mark, all compared at once.
  class Lanes {
   public:
    Lanes(const Bucket& bucket, std::uint16_t mark) noexcept {
      Marks marks;
      std::memcpy(&marks, bucket.marks.data(), sizeof marks);
      const auto equal = marks == mark;
      std::array<std::uint64_t, 2> words;
      std::memcpy(words.data(), &equal, sizeof words);
      lanes_ = (words[0] & 0x0001000100010001) | (words[1] & 0x0002000200020002);
    }
    bool empty() const noexcept { return lanes_ == 0; }
    std::size_t first() const noexcept {
      const auto bit = static_cast<std::size_t>(std::countr_zero(lanes_));
      return bit / 16 + bit % 16 * 4;
    }
    void drop_first() noexcept { lanes_ &= lanes_ - 1; }

   private:
    using Marks [[gnu::vector_size(2 * kLanes)]] = std::uint16_t;

    std::uint64_t lanes_;  // bit 16 i for lane i and bit 16 i + 1 for lane i + 4
  };

  static std::uint16_t mark(std::uint32_t tag) noexcept { return static_cast<std::uint16_t>(tag); }
  static std::uint32_t guest_bit(std::uint32_t tag) noexcept { return 1u << (tag & 31); }
  std::size_t home_of(std::uint32_t tag) const noexcept { return tag >> shift_; }
  std::size_t after(std::size_t at) const noexcept { return (at + 1) & (buckets_.size() - 1); }
  // The bucket of a number, and its lane there; past the last bucket: the number is not there.
  std::size_t lane_of(std::uint32_t tag, std::uint32_t value, std::size_t& lane) const noexcept {
    for (std::size_t at = home_of(tag);; at = after(at)) {
      const Bucket& bucket = buckets_[at];
      for (Lanes lanes(bucket, mark(tag)); !lanes.empty(); lanes.drop_first()) {
        lane = lanes.first();
        if (bucket.values[lane] == value) return at;
      }
      if ((bucket.guest_bits & guest_bit(tag)) == 0) return buckets_.size();
    }
  }
  void erase(std::uint32_t tag, std::size_t at, std::size_t lane) noexcept {
    buckets_[at].marks[lane] = kFree;
    buckets_[at].shared &= ~(1u << lane);
    for (std::size_t passed = home_of(tag); passed != at; passed = after(passed)) {
      if (--buckets_[passed].guests == 0) buckets_[passed].guest_bits = 0;
    }
    --size_;
  }
  void place(std::uint32_t tag, std::uint32_t value, bool shared) noexcept {
    std::size_t at = home_of(tag);
    Lanes free(buckets_[at], kFree);
    while (free.empty()) {
      ++buckets_[at].guests;
      buckets_[at].guest_bits |= guest_bit(tag);
      at = after(at);
      free = Lanes(buckets_[at], kFree);
    }
    const std::size_t lane = free.first();
    buckets_[at].marks[lane] = mark(tag);
    buckets_[at].values[lane] = value;
    if (shared) buckets_[at].shared |= 1u << lane;
  }
  template <typename TagAt>
  void grow(TagAt tag_at) {
    HugeArray<Bucket> old(2 * buckets_.size());
    old.prefer_huge_pages(0, old.size());
    std::swap(old, buckets_);
    --shift_;
    for (std::size_t at = 0; at < old.size(); ++at) {
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        if (old[at].marks[lane] == kFree) continue;
        place(tag_at(old[at].values[lane]), old[at].values[lane], (old[at].shared >> lane & 1) != 0);
      }
    }
  }

  HugeArray<Bucket> buckets_;  // a power of two
  unsigned shift_;
  std::size_t size_ = 0;
};

}  // namespace understudy
