// Who is evicted from the host under vLLM's native offloading: the orders that its releases keep.
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
  bool touches = true;          // lookups and stores make chunks young (0.28 to 0.30); else the end of a request does
  bool arc_falls_back = false;  // where no chunk seen again may go, one seen once does, however few there are
};

// A place for a chunk on the host: two to a cache line, since memory is what the orders wait for. One that was never
// used is all zeros.
struct alignas(32) HostChunk {
  static constexpr std::int32_t kAbsent = 0;
  static constexpr std::int32_t kWriting = 1;
  static constexpr std::int32_t kIdle = 2;  // and one more for each load that reads it

  LineageHash key;  // of the chunk that is here
  SlotId prev = 0;  // in the list that its order keeps it in
  SlotId next = 0;
  std::int32_t refs = kAbsent;
  bool shielded = false;  // not to be evicted by the call at hand
  bool often = false;     // ARC: it was used again

  bool here() const noexcept { return refs != kAbsent; }
  bool ready() const noexcept { return refs >= kIdle; }
  bool idle() const noexcept { return refs == kIdle; }
  bool loading() const noexcept { return refs > kIdle; }
  bool evictable() const noexcept { return idle() && !shielded; }
};
static_assert(sizeof(HostChunk) == 32);

using HostChunks = HugeArray<HostChunk>;

// What one request did to the chunk at a position of its own.
enum ChunkUse : std::uint8_t {
  kSeen = 1,      // stored, loaded, or found ready when it was offered
  kInserted = 2,  // it stored it
  kReused = 4,    // it found it, stored by somebody else
  kMissed = 8,    // it was absent when it was offered
};

// What a request remembers of a chunk: where it was last, if it is there still, and what it did to it.
struct ChunkMemo {
  SlotId slot = kNoSlot;
  std::uint8_t uses = 0;
};

// Chunks in an order, each in at most one list.
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

// Told of every chunk that comes, goes, or is used. Spans of a call name the same chunks, by position; kNoSlot where
// one is absent.
class HostOrder {
 public:
  virtual ~HostOrder() = default;

  virtual void inserted(std::span<const SlotId> slots) = 0;  // they are being written
  virtual void idle(SlotId) {}                               // no transfer has it any longer
  virtual void busy(SlotId) {}
  // A request was looked up, or stored something: these are all of its chunks.
  virtual void touch(std::span<const BlockIdentity>, std::span<const SlotId>) {}
  // Chunks that a request offers for the first time, and that are absent. Those of them that find room are inserted
  // next.
  virtual void missed(std::span<const LineageHash>) {}
  // A request has ended; what it did to each of its chunks.
  virtual void ended(std::span<const ChunkMemo>, std::span<const SlotId>) {}
  // Appends the next `count` that go to `out`, and forgets them; or, with fewer that may go, nothing and false.
  virtual bool evict(std::size_t count, std::vector<SlotId>& out) = 0;
  // The next to go, oldest first; empty where the order is none.
  virtual std::vector<SlotId> oldest(std::size_t limit) const = 0;
  virtual bool has_oldest() const noexcept { return true; }
};

std::unique_ptr<HostOrder> make_host_order(const HostRules& rules, HostChunks& chunks);

}  // namespace understudy
