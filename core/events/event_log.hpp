// What an engine says about its blocks, step by step: rows of the raw stream, visible at the end of their step.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "events/event_ring.hpp"

namespace understudy {

// Rows of ended steps. Those that are not `sole` belong to the raw stream alone.
struct TimedEvents {
  DrainedEvents batch;
  std::vector<std::int64_t> time_ns;  // for each record: the end of its step
};

class EngineEventLog {
 public:
  // Takes what a store has told, as it happened.
  void add(const DrainedEvents& told) {
    for (const EventRecord& record : told.records) add(record);
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

  // What was pulled since the step before is visible from now on. Returns it.
  std::span<const EventRecord> end_step(std::int64_t end_ns) {
    const std::size_t before = time_ns_.size();
    time_ns_.resize(records_.size(), end_ns);
    return std::span<const EventRecord>(records_).subspan(before);
  }

  // Everything, visible or not; the step in progress then has nothing more to tell of it.
  DrainedEvents drain() {
    time_ns_.clear();
    told_ = 0;
    DrainedEvents out;
    out.records = std::exchange(records_, {});
    return out;
  }
  // What nobody was told by this call before, visible or not. It stays, for those who take.
  DrainedEvents tell() {
    DrainedEvents out;
    out.records.assign(records_.begin() + static_cast<std::ptrdiff_t>(told_), records_.end());
    told_ = records_.size();
    return out;
  }
  TimedEvents take_visible() {
    TimedEvents out;
    told_ -= std::min(told_, time_ns_.size());
    const auto end = records_.begin() + static_cast<std::ptrdiff_t>(time_ns_.size());
    out.batch.records.assign(records_.begin(), end);
    records_.erase(records_.begin(), end);
    out.time_ns = std::exchange(time_ns_, {});
    return out;
  }

 private:
  void add(EventRecord record) {
    record.id = next_id_++;
    records_.push_back(record);
  }

  std::vector<EventRecord> records_;
  std::vector<std::int64_t> time_ns_;  // of the first so many records
  std::size_t told_ = 0;               // the first so many records were told
  std::uint64_t next_id_ = 0;
};

}  // namespace understudy
