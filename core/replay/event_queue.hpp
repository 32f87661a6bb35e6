// Everything that will happen in a run, in one order: by time, class, owner, and order of entry.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/placed_heap.hpp"

namespace understudy {

// The order of events at one time.
enum class EventClass : std::uint8_t {
  Landing,   // transfers end
  StepEnd,   // a worker's step ends, or the worker is polled because it may have finished a request
  Delivery,  // KV events reach the router
  Fault,     // something fails, or recovers
  HandBack,  // a worker has drained for too long
  Tick,      // a scaler reads the fleet and orders workers
  Ready,     // a worker has started; the tick before sees it starting, as in Dynamo's replay
  Session,   // a policy decides on the KV of a session that sleeps
  Arrival,   // a request arrives
  Abort,     // the client of a request aborts it
  Begin,     // workers that are free begin a step, with all that arrived before
};

// Entries can be cancelled. Landings have a single entry, which moves; beginnings are all of one time, and follow all
// other events of that time: neither needs a place in the heap.
class EventQueue {
 public:
  using Handle = std::uint32_t;
  static constexpr Handle kNone = 0xFFFFFFFFu;

  struct Entry {
    std::int64_t time_ns = 0;
    EventClass kind = EventClass::Landing;
    Handle id = kNone;
    std::uint64_t owner = 0;     // orders equals; never how workers are numbered
    std::uint64_t sequence = 0;  // and then the order of entry
    std::uint64_t subject = 0;   // chosen by the owner

    bool operator<(const Entry& other) const noexcept {
      return std::tie(time_ns, kind, owner, sequence) <
             std::tie(other.time_ns, other.kind, other.owner, other.sequence);
    }
  };

  bool empty() const noexcept { return heap_.empty() && beginnings_.empty() && !landing_ns_; }

  Handle push(std::int64_t time_ns, EventClass kind, std::uint64_t owner, std::uint64_t subject) {
    if (free_.empty()) free_.push_back(handles_++);
    const Handle handle = free_.back();
    free_.pop_back();
    heap_.set({time_ns, kind, handle, owner, next_sequence_++, subject});
    return handle;
  }

  // Time of the next transfer end, if any is in flight.
  void set_landing(const std::optional<std::int64_t>& time_ns) noexcept { landing_ns_ = time_ns; }
  // Now, which is not before anything that has happened.
  void push_beginning(std::int64_t now_ns, std::size_t subject) {
    beginning_ns_ = now_ns;
    beginnings_.push_back(subject);
  }
  void take_beginnings(std::vector<std::size_t>& out) {
    out.clear();
    out.swap(beginnings_);
  }

  // Returns the next entry; a landing stays, and so do beginnings until they are taken.
  Entry pop() {
    const std::int64_t time_ns = heap_.empty() ? kNever : heap_.top().time_ns;
    if (!beginnings_.empty() && beginning_ns_ < std::min(time_ns, landing_ns_.value_or(kNever))) {
      return {beginning_ns_, EventClass::Begin};
    }
    if (landing_ns_ && *landing_ns_ <= time_ns) return {*landing_ns_, EventClass::Landing};
    const Entry first = heap_.top();
    cancel(first.id);
    return first;
  }

  // Removes an entry. Its handle must not be used again.
  void cancel(Handle handle) {
    free_.push_back(handle);
    heap_.erase(handle);
  }

 private:
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

  PlacedHeap<Entry> heap_;
  std::vector<Handle> free_;
  Handle handles_ = 0;
  std::uint64_t next_sequence_ = 0;
  std::optional<std::int64_t> landing_ns_;
  std::int64_t beginning_ns_ = 0;
  std::vector<std::size_t> beginnings_;
};

}  // namespace understudy
