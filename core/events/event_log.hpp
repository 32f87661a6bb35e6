// KV events of an engine: rows of the raw stream, each with the time from which it is visible.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

#include "base/assert.hpp"
#include "events/event_ring.hpp"

namespace understudy {

// Visible rows. Rows that are not `sole` belong to the raw stream only.
struct TimedEvents {
  DrainedEvents batch;
  std::vector<std::int64_t, HugeAllocator<std::int64_t>> time_ns;  // for each record
};

// Device rows become visible at the end of their step, rows of lower tiers at once, so rows are not taken in exactly
// the order in which they happened; ids increase in the order in which rows are taken.
class EngineEventLog {
 public:
  // Adds the events of a store, in order.
  void add(const DrainedEvents& drained) { add(drained.records); }
  void add(std::span<const EventRecord> records) {
    for (const EventRecord& record : records) add(record);
  }
  // Adds the events of one allocation: on the device, Stored before the Removed that made room.
  void add_stored_first(const DrainedEvents& drained) {
    for (const EventKind kind : {EventKind::Stored, EventKind::Removed}) {
      for (const EventRecord& record : drained.records) {
        if (record.kind == kind && record.tier == Tier::G1) add(record);
      }
    }
    for (const EventRecord& record : drained.records) {
      if (record.tier != Tier::G1) add(record);
    }
  }

  // Adds `records` and makes visible what `show(now_ns, device)` would.
  std::span<const EventRecord> show(std::span<const EventRecord> records, std::int64_t now_ns, bool device) {
    if (!device || !hidden_.empty()) {
      for (const EventRecord& record : records) add(record);
      return show(now_ns, device);
    }
    EventRecords& visible = visible_.batch.records;
    const std::size_t before = visible.size();
    visible.insert(visible.end(), records.begin(), records.end());
    for (std::size_t i = before; i < visible.size(); ++i) visible[i].id = happened_++;
    visible_.time_ns.resize(visible.size(), now_ns);
    return std::span<const EventRecord>(visible).subspan(before);
  }
  // Makes added rows visible from `now_ns` on: all of them, or (`device` false) those of lower tiers. Returns them.
  std::span<const EventRecord> show(std::int64_t now_ns, bool device) {
    UNDERSTUDY_ASSERT(visible_.time_ns.empty() || visible_.time_ns.back() <= now_ns,
                      "events become visible in the past");
    EventRecords& visible = visible_.batch.records;
    const std::size_t before = visible.size();
    if (device) {
      visible.insert(visible.end(), hidden_.begin(), hidden_.end());
      hidden_.clear();
    } else {
      std::erase_if(hidden_, [&](const EventRecord& record) {
        if (record.tier == Tier::G1) return false;
        visible.push_back(record);
        return true;
      });
    }
    visible_.time_ns.resize(visible.size(), now_ns);
    return std::span<const EventRecord>(visible).subspan(before);
  }

  // Rows of a step that has not ended; forget_hidden drops them when no reader needs them.
  std::span<const EventRecord> hidden() const noexcept { return hidden_; }
  void forget_hidden() noexcept { hidden_.clear(); }

  bool has_visible() const noexcept { return !visible_.batch.records.empty(); }
  // Takes the visible rows since the last call, by time.
  TimedEvents take_visible() {
    TimedEvents out;
    take_visible(out);
    return out;
  }
  // Same, reusing the memory of `out`.
  void take_visible(TimedEvents& out) {
    out.batch.records.clear();
    out.time_ns.clear();
    std::swap(out, visible_);
    if (keeps_taken_) {
      std::ranges::copy_if(out.batch.records, std::back_inserter(taken_),
                           [&](const EventRecord& record) { return record.id >= peeked_; });
    }
    number(out.batch.records);
  }
  // Takes everything since the last call, in order, including rows of the step in progress.
  DrainedEvents take_all() {
    DrainedEvents out;
    out.records = since(0);
    visible_ = {};
    hidden_.clear();
    number(out.records);
    return out;
  }
  // Returns the rows that this call has not returned before, in order, without taking them.
  DrainedEvents peek_new() {
    DrainedEvents out;
    out.records = since(peeked_);
    out.records.insert(out.records.begin(), taken_.begin(), taken_.end());
    std::ranges::sort(out.records, {}, &EventRecord::id);
    taken_.clear();
    peeked_ = happened_;
    return out;
  }
  // For a reader that peeks at step ends: keeps rows that others take in between; forget_taken drops them.
  void keep_taken() noexcept { keeps_taken_ = true; }
  void forget_taken() noexcept { taken_.clear(); }

 private:
  // Until it is taken, a row's id is its number in the order of events.
  void add(EventRecord record) {
    record.id = happened_++;
    hidden_.push_back(record);
  }
  EventRecords since(std::uint64_t first) const {
    EventRecords out;
    for (const EventRecords* rows : {&visible_.batch.records, &hidden_}) {
      for (const EventRecord& record : *rows) {
        if (record.id >= first) out.push_back(record);
      }
    }
    std::ranges::sort(out, {}, &EventRecord::id);
    return out;
  }
  // Ids are strictly increasing over all calls.
  void number(EventRecords& records) {
    for (EventRecord& record : records) record.id = next_id_++;
  }

  TimedEvents visible_;
  EventRecords hidden_;  // of a step that has not ended
  EventRecords taken_;   // taken, and not peeked at yet
  bool keeps_taken_ = false;
  std::uint64_t happened_ = 0;
  std::uint64_t peeked_ = 0;
  std::uint64_t next_id_ = 0;
};

}  // namespace understudy
