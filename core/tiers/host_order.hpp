// Eviction orders of the host under vLLM's native offloading, by release.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/huge_array.hpp"
#include "slots/slot.hpp"

namespace understudy {

enum class HostPolicy : std::uint8_t { Lru, Arc };

struct HostRules {
  HostPolicy policy = HostPolicy::Lru;
  bool touches = true;          // lookups and stores refresh chunks (0.28 to 0.30); else the end of a request does
  bool ranks = false;           // LRU ranks chunks by the request that used them last (since 0.33)
  bool arc_falls_back = false;  // evict a chunk seen once, however few there are, when none seen again is evictable
};

// A place for a chunk on the host: two per cache line, because the orders are bound by memory. A place that was never
// used is all zeros.
struct alignas(32) HostChunk {
  static constexpr std::int32_t kAbsent = 0;
  static constexpr std::int32_t kWriting = 1;
  static constexpr std::int32_t kIdle = 2;  // plus one for each load that reads it

  LineageHash key;  // of the chunk in this place
  SlotId prev = 0;  // in the list of its order
  SlotId next = 0;
  std::int32_t refs = kAbsent;
  bool shielded = false;  // must not be evicted by the current call
  bool often = false;     // ARC: used again

  bool here() const noexcept { return refs != kAbsent; }
  bool ready() const noexcept { return refs >= kIdle; }
  bool idle() const noexcept { return refs == kIdle; }
  bool loading() const noexcept { return refs > kIdle; }
  bool evictable() const noexcept { return idle() && !shielded; }
};
static_assert(sizeof(HostChunk) == 32);

using HostChunks = HugeArray<HostChunk>;

// Uses of a chunk by one request.
enum ChunkUse : std::uint8_t {
  kSeen = 1,      // stored, loaded, or found ready when offered
  kInserted = 2,  // stored by this request
  kReused = 4,    // found, stored by another request
  kMissed = 8,    // absent when offered
};

// A request's memo of a chunk: its last slot, which may be stale, and what the request did to it.
struct ChunkMemo {
  SlotId slot = kNoSlot;
  std::uint8_t uses = 0;
};

// A request that uses chunks.
struct ChunkUser {
  std::uint64_t& number;                     // drawn by an order at its first use; 0: none yet
  std::uint32_t first = 0;                   // position of the first chunk of a call
  const std::uint64_t* positions = nullptr;  // of each chunk of a call, where they are not consecutive

  std::uint64_t position(std::uint32_t place) const noexcept {
    return positions != nullptr ? positions[place] : std::uint64_t{first} + place;
  }
};

// A chunk that a request uses for the first time.
struct FirstUse {
  std::uint32_t place = 0;  // in its call
  SlotId slot = kNoSlot;    // kNoSlot: absent
};

// A list of chunks; a chunk is in at most one list.
class ChunkList {
 public:
  explicit ChunkList(HostChunks& chunks) : chunks_(chunks) {}

  std::size_t size() const noexcept { return size_; }
  SlotId front() const noexcept { return front_; }
  SlotId after(SlotId slot) const noexcept { return chunks_[slot].next; }
  void push_back(SlotId slot) noexcept;
  void remove(SlotId slot) noexcept;
  void refresh(SlotId slot) noexcept {
    if (slot == back_) return;
    remove(slot);
    push_back(slot);
  }

 private:
  HostChunks& chunks_;
  SlotId front_ = kNoSlot;
  SlotId back_ = kNoSlot;
  std::size_t size_ = 0;
};

// Notified of every insertion, eviction and use of chunks. Spans of a call name the same chunks, by position; kNoSlot
// where one is absent.
class HostOrder {
 public:
  virtual ~HostOrder() = default;

  // The writing of chunks begins, which are at these places of the user's call.
  virtual void inserted(ChunkUser user, std::span<const std::uint32_t> places, std::span<const SlotId> slots) = 0;
  virtual void idle(SlotId) {}  // no transfer uses it any more
  virtual void busy(SlotId) {}
  // A request was looked up or stored something; these are all of its chunks.
  virtual void touch(std::span<const BlockIdentity>, std::span<const SlotId>) {}
  // A request loads or offers chunks that it has not used before; called before their insertion.
  virtual void accessed(ChunkUser, std::span<const FirstUse>) {}
  // Absent chunks that a request offers for the first time. Those that find room are inserted next.
  virtual void missed(std::span<const LineageHash>) {}
  // A request has ended; `memos` are what it did to each of its chunks.
  virtual void ended(std::span<const ChunkMemo>, std::span<const SlotId>) {}
  // Appends the next `count` victims to `out` and removes them; returns false with nothing changed if too few are
  // evictable.
  virtual bool evict(std::size_t count, std::vector<SlotId>& out) = 0;
  // The next victims, oldest first; empty if the order has no fixed sequence.
  virtual std::vector<SlotId> oldest(std::size_t limit) const = 0;
  virtual bool has_oldest() const noexcept { return true; }
};

std::unique_ptr<HostOrder> make_host_order(const HostRules& rules, HostChunks& chunks);

}  // namespace understudy
