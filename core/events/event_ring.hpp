// KV events as the store writes them, inside its critical section, and as a consumer drains them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/assert.hpp"
#include "base/huge_allocator.hpp"
#include "slots/slot.hpp"

namespace understudy {

// Skipped: tokens of a Stored event whose block has no key of its own, in the raw stream of several cache groups only.
enum class EventKind : std::uint8_t { Stored = 0, Removed = 1, Skipped = 3 };

// Key of a block's hash in a cache group; that of the first group is the hash itself.
inline std::uint64_t group_key(std::uint64_t hash, std::uint8_t group) noexcept {
  return hash ^ (std::uint64_t{group} * 0x9E3779B97F4A7C15u);
}

// One block appeared on a tier or left it.
struct EventRecord {
  std::uint64_t id = 0;  // strictly increasing over all tiers of the store
  BlockIdentity identity;
  std::uint64_t generation = 0;  // of this hash on this tier: increases with every residency
  EventKind kind = EventKind::Stored;
  Tier tier = Tier::G1;
  bool starts = true;      // first block that one call to the store registered or removed
  bool sole = true;        // Stored: first copy on the tier. Removed: last copy. Others belong to the raw stream only.
  std::uint8_t group = 0;  // cache group of the block

  std::uint64_t key() const noexcept { return group_key(identity.sequence_hash(), group); }
};

using EventRecords = std::vector<EventRecord, HugeAllocator<EventRecord>>;

// Result of one drain.
struct DrainedEvents {
  EventRecords records;
  std::vector<Token> tokens;  // block_size per Stored record, if token ids are enabled
  std::uint64_t lost = 0;     // records overwritten since the previous drain, all older than `records`
};

// A queue of records with an optional bound. On overflow it drops the oldest records and counts them as lost.
class EventRing {
 public:
  EventRing(std::size_t capacity, std::size_t tokens_per_block)
      : capacity_(capacity), tokens_per_block_(tokens_per_block) {}

  // Marks the start of another call to the store.
  void begin_call() noexcept { starts_ = true; }
  void stored(const BlockIdentity& block, std::uint64_t generation, Tier tier, bool first, const Token* tokens) {
    push({next_id_, block, generation, EventKind::Stored, tier, starts_, first});
    if (tokens_per_block_ != 0) tokens_.insert(tokens_.end(), tokens, tokens + tokens_per_block_);
  }
  void removed(const BlockIdentity& block, std::uint64_t generation, Tier tier, bool last) {
    push({next_id_, block, generation, EventKind::Removed, tier, starts_, last});
  }
  DrainedEvents drain(std::size_t limit);
  // Unread records without a copy; `clear` marks them as read.
  std::span<const EventRecord> records() const noexcept { return std::span(records_).subspan(head_); }
  void clear() noexcept;

  std::uint64_t next_id() const noexcept { return next_id_; }
  std::size_t size() const noexcept { return records_.size() - head_; }

 private:
  void push(const EventRecord& record) {  // runs for every block of a store
    if (capacity_ != 0 && size() == capacity_) {
      forget(1);
      ++lost_;
    }
    UNDERSTUDY_ASSERT(size() == 0 || records_.back().id < record.id, "event ids are not strictly increasing");
    records_.push_back(record);
    starts_ = false;
    ++next_id_;
  }
  void forget(std::size_t count);

  std::size_t capacity_;          // 0: unbounded
  std::size_t tokens_per_block_;  // 0: no token ids
  EventRecords records_;          // those before `head_` were dropped or drained, and so were their tokens
  std::vector<Token> tokens_;
  std::size_t head_ = 0;
  std::size_t tokens_head_ = 0;
  std::uint64_t next_id_ = 0;
  std::uint64_t lost_ = 0;
  bool starts_ = true;
};

}  // namespace understudy
