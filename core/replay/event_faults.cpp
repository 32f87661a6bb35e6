#include "replay/event_faults.hpp"

#include <algorithm>
#include <limits>

#include "tokens/xxh3.hpp"

namespace understudy {

namespace {

bool is_on(const Fault& fault, std::size_t worker, std::int64_t time_ns) {
  if (fault.worker && *fault.worker != worker) return false;
  return time_ns >= fault.time_ns && (fault.duration_ns == 0 || time_ns < fault.time_ns + fault.duration_ns);
}

}  // namespace

void NamedBlocks::apply(std::span<const EventRecord> records, bool raw) {
  for (const EventRecord& record : records) {
    if (record.kind == EventKind::Skipped || !(raw || record.sole)) continue;
    const Key key{record.tier, record.key()};
    if (record.kind == EventKind::Stored) {
      Named& block = blocks_[key];
      block.copies = raw ? block.copies + 1 : 1;
      if (block.copies == 1) {
        block.first = record;
        block.first.sole = true;
        block.sequence = sequence_++;
      }
    } else if (const auto found = blocks_.find(key); found != blocks_.end()) {
      if (--found->second.copies == 0 || record.sole) blocks_.erase(found);
    }
  }
}

EventRecords NamedBlocks::difference_from(const NamedBlocks& other) const {
  const auto list = [](const NamedBlocks& from, const NamedBlocks& without) {
    std::vector<const Named*> found;
    for (const auto& [key, block] : from.blocks_) {
      if (!without.blocks_.contains(key)) found.push_back(&block);
    }
    std::ranges::sort(found, {}, &Named::sequence);
    return found;
  };
  EventRecords out;
  std::vector<const Named*> gone = list(other, *this);
  std::ranges::reverse(gone);
  for (const Named* block : gone) {
    for (std::uint64_t copy = block->copies; copy > 0; --copy) {
      EventRecord row = block->first;
      row.kind = EventKind::Removed;
      row.starts = true;
      row.sole = copy == 1;
      out.push_back(row);
    }
  }
  for (const Named* block : list(*this, other)) {
    for (std::uint64_t copy = 0; copy < block->copies; ++copy) {
      EventRecord row = block->first;
      row.starts = true;
      row.sole = copy == 0;
      out.push_back(row);
    }
  }
  return out;
}

EventFaults::EventFaults(std::span<const Fault> faults, std::uint64_t seed)
    : faults_(faults.begin(), faults.end()), seed_(seed) {}

void EventFaults::add_worker() { workers_.emplace_back(); }

// From fault, worker and time alone, so that the order of calls does not matter.
bool EventFaults::loses(std::size_t fault, std::size_t worker, std::int64_t time_ns) const noexcept {
  const std::uint64_t drawn =
      xxh3_64_pair(fault << 32 | worker, static_cast<std::uint64_t>(time_ns), seed_ ^ 0x5EED0FEEDull);
  return static_cast<double>(drawn >> 11) * 0x1p-53 < faults_[fault].rate;
}

void EventFaults::pass(std::size_t index, std::int64_t now_ns, TimedEvents& events) {
  Worker& worker = workers_[index];
  const EventRecords& rows = events.batch.records;
  worker.published.apply(rows);
  for (std::size_t first = 0, last = 0; first < rows.size(); first = last) {
    const std::int64_t time_ns = events.time_ns[first];
    while (last < rows.size() && events.time_ns[last] == time_ns) ++last;
    std::int64_t due_ns = std::max(time_ns, worker.last_due_ns);
    bool doubled = false;
    bool lost = false;
    for (std::size_t number = 0; number < faults_.size(); ++number) {
      const Fault& fault = faults_[number];
      if (!is_on(fault, index, time_ns)) continue;
      const std::int64_t end_ns =
          fault.duration_ns == 0 ? std::numeric_limits<std::int64_t>::max() : fault.time_ns + fault.duration_ns;
      if (fault.kind == FaultKind::EventGap) due_ns = std::max(due_ns, end_ns);
      if (fault.kind == FaultKind::LateEvents) due_ns = std::max(due_ns, time_ns + fault.delay_ns);
      doubled = doubled || fault.kind == FaultKind::DuplicateEvents;
      lost = lost || (fault.kind == FaultKind::LoseEvents && loses(number, index, time_ns));
    }
    if (lost) {
      worker.gaps = true;
      continue;
    }
    worker.last_due_ns = due_ns;
    const std::span<const EventRecord> batch = std::span(rows).subspan(first, last - first);
    for (int times = doubled ? 2 : 1; times > 0; --times) {
      worker.late.push_back({due_ns, EventRecords(batch.begin(), batch.end())});
    }
  }
  events.batch.records.clear();
  events.time_ns.clear();
  while (!worker.late.empty() && worker.late.front().due_ns <= now_ns) {
    const Late& batch = worker.late.front();
    worker.received.apply(batch.rows);
    events.batch.records.insert(events.batch.records.end(), batch.rows.begin(), batch.rows.end());
    events.time_ns.resize(events.batch.records.size(), batch.due_ns);
    worker.late.pop_front();
  }
}

EventRecords EventFaults::reread(std::size_t index) {
  Worker& worker = workers_[index];
  EventRecords rows = worker.published.difference_from(worker.received);
  worker.received = worker.published;
  worker.late.clear();
  worker.gaps = false;
  return rows;
}

EventRecords EventFaults::forget(std::size_t index) {
  Worker& worker = workers_[index];
  EventRecords rows = NamedBlocks().difference_from(worker.received);
  worker.received.clear();
  worker.late.clear();
  worker.gaps = true;
  return rows;
}

EventRecords EventFaults::end(std::size_t index) {
  EventRecords rows = forget(index);
  workers_[index].published.clear();
  workers_[index].gaps = false;
  return rows;
}

}  // namespace understudy
