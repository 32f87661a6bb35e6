// Who is evicted from the host under vLLM's native offloading: the orders that its releases keep.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "slots/slot.hpp"

namespace understudy {

enum class HostPolicy : std::uint8_t { Lru, Arc };

// A chunk on the host, by its slot.
struct HostChunks {
  static constexpr std::int32_t kAbsent = -2;
  static constexpr std::int32_t kWriting = -1;

  std::vector<std::int32_t> refs;      // kAbsent, kWriting, 0 (idle), or how many loads read it
  std::vector<std::uint8_t> shielded;  // not to be evicted by the call at hand

  bool ready(SlotId slot) const noexcept { return refs[slot] >= 0; }
  bool evictable(SlotId slot) const noexcept { return refs[slot] == 0 && shielded[slot] == 0; }
};

// What one request did to the chunk at a position of its own.
enum ChunkUse : std::uint8_t {
  kSeen = 1,      // stored, loaded, or found ready when it was offered
  kInserted = 2,  // it stored it
  kReused = 4,    // it found it, stored by somebody else
  kMissed = 8,    // it was absent when it was offered
};

// Slots in an order; each is in at most one of the lists that share `links`.
class ChunkList {
 public:
  struct Links {
    explicit Links(std::size_t count) : prev(count, kNoSlot), next(count, kNoSlot) {}
    std::vector<SlotId> prev;
    std::vector<SlotId> next;
  };

  explicit ChunkList(Links& links) : links_(links) {}

  std::size_t size() const noexcept { return size_; }
  SlotId front() const noexcept { return front_; }
  SlotId after(SlotId slot) const noexcept { return links_.next[slot]; }
  void push_back(SlotId slot) noexcept;
  void remove(SlotId slot) noexcept;
  void refresh(SlotId slot) noexcept {
    remove(slot);
    push_back(slot);
  }

 private:
  Links& links_;
  SlotId front_ = kNoSlot;
  SlotId back_ = kNoSlot;
  std::size_t size_ = 0;
};

// Told of every chunk that comes, goes, or is used. `keys` and `slots` of a call name the same chunks, by position;
// kNoSlot where one is absent.
class HostOrder {
 public:
  virtual ~HostOrder() = default;

  virtual void inserted(SlotId slot, const LineageHash& key) = 0;  // it is being written
  virtual void idle(SlotId) {}                                     // no transfer has it any longer
  virtual void busy(SlotId) {}
  // A request was looked up, or stored something: these are all of its chunks.
  virtual void touch(std::span<const LineageHash>, std::span<const SlotId>) {}
  // Chunks that a request offers for the first time, and that are absent.
  virtual void missed(std::span<const LineageHash>) {}
  // A request has ended; `uses` of each of its chunks.
  virtual void ended(std::span<const std::uint8_t>, std::span<const SlotId>) {}
  // Appends the next `count` that go to `out`, and forgets them; or, with fewer that may go, nothing and false.
  virtual bool evict(std::size_t count, std::vector<SlotId>& out) = 0;
  // The next to go, oldest first; empty where the order is none.
  virtual std::vector<SlotId> oldest(std::size_t limit) const = 0;
  virtual bool has_oldest() const noexcept { return true; }
};

// `touches`: lookups and stores make chunks young (a014e35f); else the end of a request does (0.32).
std::unique_ptr<HostOrder> make_host_order(HostPolicy policy, bool touches, const HostChunks& chunks);

}  // namespace understudy
