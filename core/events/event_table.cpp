#include "events/event_table.hpp"

#include <algorithm>
#include <array>

#include "tokens/xxh3.hpp"

namespace understudy {

namespace {

// True if the row follows from the run before it: same call, kind and tier, next position and generation.
bool continues(const EventRecord& before, const EventRecord& row) noexcept {
  if (row.starts || row.kind != before.kind || row.tier != before.tier || row.sole != before.sole ||
      row.group != before.group) {
    return false;
  }
  if (row.kind == EventKind::Removed) {
    return row.generation + 1 == before.generation && row.identity.position() + 1 == before.identity.position();
  }
  return row.generation == before.generation + 1 && row.identity.position() == before.identity.position() + 1 &&
         row.identity.parent_hash == before.identity.sequence_hash();
}

}  // namespace

// A part has as many rows as all parts before it: small tables stay small, large ones have few parts.
EventTable::Part& EventTable::room() {
  if (parts_.empty() || parts_.back().sequence_hashes.size() == parts_.back().most_rows) {
    Part& part = parts_.emplace_back();
    part.most_rows = std::clamp(rows_, kFirstRows, kMostRows);
    part.sequence_hashes.reserve(part.most_rows);
    part.local_hashes.reserve(part.most_rows);
  }
  return parts_.back();
}

void EventTable::append(const TimedEvents& more) {
  if (std::ranges::any_of(more.batch.records, [](const EventRecord& row) { return row.kind == EventKind::Skipped; })) {
    TimedEvents kept;
    for (std::size_t i = 0; i < more.batch.records.size(); ++i) {
      if (more.batch.records[i].kind == EventKind::Skipped) continue;
      kept.batch.records.push_back(more.batch.records[i]);
      kept.time_ns.push_back(more.time_ns[i]);
    }
    append(kept);
    return;
  }
  const EventRecords& records = more.batch.records;
  const EventRecord* before = &last_;
  for (std::size_t i = 0; i < records.size();) {
    Part& part = room();
    const std::size_t begin = i;
    const std::size_t end = std::min(records.size(), i + part.most_rows - part.sequence_hashes.size());
    for (; i < end; ++i) {
      const EventRecord& row = records[i];
      if (runs_.empty() || runs_.back().time_ns != more.time_ns[i] || !continues(*before, row)) {
        const std::uint64_t parent = row.kind == EventKind::Stored ? row.identity.parent_hash : 0;
        runs_.push_back({rows_ + (i - begin), parent, more.time_ns[i], row.generation, row.identity.position(),
                         row.kind, row.tier, row.starts, row.sole, row.group});
        all_sole_ = all_sole_ && row.sole;
      }
      part.sequence_hashes.push_back(row.identity.sequence_hash());
      if (row.kind == EventKind::Stored) part.local_hashes.push_back(row.identity.local_hash);
      before = &row;
    }
    rows_ += end - begin;
  }
  last_ = *before;
}

EventTable::Heads EventTable::heads(bool raw) const {
  Heads out;
  std::uint64_t blocks = 0;
  bool same_call = false;
  const Run* before = nullptr;  // previous run of the stream
  std::uint64_t before_rows = 0;
  std::uint64_t before_hash = 0;  // hash of its last row
  std::size_t part = 0;
  std::uint64_t part_row = 0;
  for (std::size_t i = 0; i < runs_.size(); ++i) {
    const Run& run = runs_[i];
    const std::uint64_t rows = end_of(i) - run.first_row;
    same_call = same_call && !run.starts;  // also for runs that the stream leaves out
    if (!raw && !run.sole) continue;
    const bool stored = run.kind == EventKind::Stored;
    const bool goes_on =
        same_call && before->kind == run.kind && before->tier == run.tier && before->group == run.group &&
        (!stored || (run.parent_hash == before_hash && run.position == before->position + before_rows));
    if (!goes_on) {
      out.kinds.push_back(static_cast<std::uint8_t>(run.kind));
      out.tiers.push_back(static_cast<std::uint8_t>(run.tier));
      out.groups.push_back(run.group);
      out.parents.push_back(run.parent_hash);
      out.offsets.push_back(static_cast<std::int64_t>(blocks));
      out.time_ns.push_back(run.time_ns);
    }
    out.run_offsets.push_back(static_cast<std::int64_t>(blocks));
    out.run_positions.push_back(run.position);
    out.run_generations.push_back(run.generation);
    blocks += rows;
    same_call = true;
    before = &run;
    before_rows = rows;
    const std::uint64_t last_row = run.first_row + rows - 1;
    while (last_row >= part_row + parts_[part].sequence_hashes.size()) {
      part_row += parts_[part++].sequence_hashes.size();
    }
    before_hash = parts_[part].sequence_hashes[last_row - part_row];
  }
  out.offsets.push_back(static_cast<std::int64_t>(blocks));
  out.run_offsets.push_back(static_cast<std::int64_t>(blocks));
  return out;
}

EventTable::Part EventTable::sole_of(std::size_t index) const {
  Part out;
  const Part& part = parts_[index];
  std::uint64_t first = 0;
  for (std::size_t i = 0; i < index; ++i) first += parts_[i].sequence_hashes.size();
  const std::uint64_t end = first + part.sequence_hashes.size();
  auto run = std::upper_bound(runs_.begin(), runs_.end(), first,
                              [](std::uint64_t row, const Run& one) { return row < one.first_row; });
  --run;
  std::uint64_t local = 0;
  for (std::uint64_t row = first; row < end; ++run) {
    const auto at = static_cast<std::size_t>(run - runs_.begin());
    const std::uint64_t last = std::min(end, end_of(at));
    const std::uint64_t locals = run->kind == EventKind::Stored ? last - row : 0;
    if (run->sole) {
      const auto hashes = part.sequence_hashes.begin() + static_cast<std::ptrdiff_t>(row - first);
      out.sequence_hashes.insert(out.sequence_hashes.end(), hashes, hashes + static_cast<std::ptrdiff_t>(last - row));
      const auto own = part.local_hashes.begin() + static_cast<std::ptrdiff_t>(local);
      out.local_hashes.insert(out.local_hashes.end(), own, own + static_cast<std::ptrdiff_t>(locals));
    }
    local += locals;
    row = last;
  }
  out.most_rows = out.sequence_hashes.size();
  return out;
}

TimedEvents EventTable::rows() const {
  TimedEvents out;
  out.batch.records.reserve(rows_);
  out.time_ns.reserve(rows_);
  std::size_t run = 0;
  std::uint64_t row = 0;
  std::uint64_t before = 0;
  for (const Part& part : parts_) {
    std::size_t local = 0;
    for (const std::uint64_t hash : part.sequence_hashes) {
      if (row == end_of(run)) ++run;
      const Run& its = runs_[run];
      const bool stored = its.kind == EventKind::Stored;
      const std::uint64_t behind = row - its.first_row;
      const auto steps = static_cast<std::uint32_t>(behind);
      const std::uint64_t parent = !stored ? 0 : behind == 0 ? its.parent_hash : before;
      const std::uint32_t position = stored ? its.position + steps : its.position - steps;
      EventRecord record;
      record.id = row;
      record.identity.lineage = LineageHash::make(hash, parent != 0, parent, position);
      record.identity.parent_hash = parent;
      if (stored) record.identity.local_hash = part.local_hashes[local++];
      record.generation = stored ? its.generation + behind : its.generation - behind;
      record.kind = its.kind;
      record.tier = its.tier;
      record.starts = its.starts && behind == 0;
      record.sole = its.sole;
      record.group = its.group;
      out.batch.records.push_back(record);
      out.time_ns.push_back(its.time_ns);
      before = hash;
      ++row;
    }
  }
  return out;
}

std::uint64_t EventTable::digest() const noexcept {
  std::uint64_t value = rows_;
  const auto add = [&value](const auto& column) {
    value = xxh3_64(column.data(), column.size() * sizeof(column[0]), value);
  };
  for (const Part& part : parts_) {
    add(part.sequence_hashes);
    add(part.local_hashes);
  }
  for (const Run& run : runs_) {
    const auto kind = static_cast<std::uint64_t>(run.kind);
    const auto what = kind | std::uint64_t{run.starts} << 1 | std::uint64_t{run.sole} << 2 |
                      static_cast<std::uint64_t>(run.tier) << 3 | std::uint64_t{run.group} << 8 |
                      std::uint64_t{run.position} << 32;
    add(std::array{run.first_row, run.parent_hash, static_cast<std::uint64_t>(run.time_ns), run.generation, what});
  }
  return value;
}

}  // namespace understudy
