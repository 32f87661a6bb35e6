// What an engine says about its blocks: rows of the raw stream, each with the time from which it is visible.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

#include "events/event_ring.hpp"

namespace understudy {

// Visible rows. Those that are not `sole` belong to the raw stream alone.
struct TimedEvents {
  DrainedEvents batch;
  std::vector<std::int64_t, HugeAllocator<std::int64_t>> time_ns;  // for each record
};

// Rows of the device are visible at the end of the step that they belong to, those of tiers below when they happen. So
// the order in which rows are taken is not quite the order in which they happened; ids rise in the order in which they
// are handed out.
class EngineEventLog {
 public:
  // Takes what a store has told, as it happened.
  void add(const DrainedEvents& told) { add(told.records); }
  void add(std::span<const EventRecord> told) {
    for (const EventRecord& record : told) add(record);
  }
  // The same for one allocation: on the device, what it stored before what it removed for that.
  void add_stored_first(const DrainedEvents& told) {
    for (const EventKind kind : {EventKind::Stored, EventKind::Removed}) {
      for (const EventRecord& record : told.records) {
        if (record.kind == kind && record.tier == Tier::G1) add(record);
      }
    }
    for (const EventRecord& record : told.records) {
      if (record.tier != Tier::G1) add(record);
    }
  }

  // The same, and `show`.
  std::span<const EventRecord> show(std::span<const EventRecord> told, std::int64_t now_ns, bool device) {
    if (!device || !hidden_.empty()) {
      for (const EventRecord& record : told) add(record);
      return show(now_ns, device);
    }
    EventRecords& visible = visible_.batch.records;
    const std::size_t before = visible.size();
    visible.insert(visible.end(), told.begin(), told.end());
    for (std::size_t i = before; i < visible.size(); ++i) visible[i].id = happened_++;
    visible_.time_ns.resize(visible.size(), now_ns);
    return std::span<const EventRecord>(visible).subspan(before);
  }
  // What has been added is visible from `now_ns` on: all of it, or what is not the device's. Returns that.
  std::span<const EventRecord> show(std::int64_t now_ns, bool device) {
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

  // Rows of a step that has not ended; and that nobody will ask for them.
  std::span<const EventRecord> hidden() const noexcept { return hidden_; }
  void forget_hidden() noexcept { hidden_.clear(); }

  // Visible rows since the last call, by time.
  TimedEvents take_visible() {
    TimedEvents out;
    take_visible(out);
    return out;
  }
  // The same in the room that `out` has, for who takes often.
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
  // Everything since the last call, as it happened; the step in progress then has nothing more to tell of it.
  DrainedEvents take_all() {
    DrainedEvents out;
    out.records = since(0);
    visible_ = {};
    hidden_.clear();
    number(out.records);
    return out;
  }
  // What this call has not returned before, as it happened. It stays, for those who take.
  DrainedEvents peek_new() {
    DrainedEvents out;
    out.records = since(peeked_);
    out.records.insert(out.records.begin(), taken_.begin(), taken_.end());
    std::ranges::sort(out.records, {}, &EventRecord::id);
    taken_.clear();
    peeked_ = happened_;
    return out;
  }
  // For who peeks when a step ends: rows that others take before, as transfers land; and that nobody peeks any more.
  void keep_taken() noexcept { keeps_taken_ = true; }
  void forget_taken() noexcept { taken_.clear(); }

 private:
  // Until it is handed out, a row's id is its place in the order in which things happened.
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
  void number(EventRecords& records) {
    for (EventRecord& record : records) record.id = next_id_++;
  }

  TimedEvents visible_;
  EventRecords hidden_;  // of a step that has not ended
  EventRecords taken_;   // that nobody has peeked at
  bool keeps_taken_ = false;
  std::uint64_t happened_ = 0;
  std::uint64_t peeked_ = 0;
  std::uint64_t next_id_ = 0;
};

}  // namespace understudy
