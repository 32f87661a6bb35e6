// All events of a publisher in a run, in a quarter of the memory of its rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/huge_allocator.hpp"
#include "events/event_log.hpp"

namespace understudy {

// Rows come in runs: blocks stored one after the other, or removed from last to first. Only the hashes are kept per
// row, in parts that never move; everything else is kept per run. Parents and local hashes of Removed rows are not
// kept.
class EventTable {
 public:
  template <typename T>
  using Column = std::vector<T, HugeAllocator<T>>;

  struct Run {
    std::uint64_t first_row = 0;
    std::uint64_t parent_hash = 0;  // of its first row, if Stored
    std::int64_t time_ns = 0;
    std::uint64_t generation = 0;  // of its first row; increases by one per row, or decreases if Removed
    std::uint32_t position = 0;    // likewise
    EventKind kind = EventKind::Stored;
    Tier tier = Tier::G1;
    bool starts = true;
    bool sole = true;
    std::uint8_t group = 0;
  };
  struct Part {
    Column<std::uint64_t> sequence_hashes;
    Column<std::uint64_t> local_hashes;  // of Stored rows
    std::size_t most_rows = 0;
  };
  // The events of a stream without their hashes, as in `understudy.events.file`.
  struct Heads {
    std::vector<std::uint8_t> kinds;
    std::vector<std::uint8_t> tiers;
    std::vector<std::uint8_t> groups;
    std::vector<std::uint64_t> parents;
    std::vector<std::int64_t> offsets;
    std::vector<std::int64_t> time_ns;
    std::vector<std::int64_t> run_offsets;
    std::vector<std::uint32_t> run_positions;
    std::vector<std::uint64_t> run_generations;
  };

  // Appends rows in the order of publication, without skipped ones.
  void append(const TimedEvents& more);

  std::size_t size() const noexcept { return rows_; }
  bool all_sole() const noexcept { return all_sole_; }
  std::span<const Part> parts() const noexcept { return parts_; }
  Heads heads(bool raw) const;
  // Returns the rows of a part that belong to the consolidated stream.
  Part sole_of(std::size_t part) const;
  // Rebuilds the rows; Removed rows have no parents and local hashes.
  TimedEvents rows() const;
  // Hash of the content.
  std::uint64_t digest() const noexcept;

 private:
  static constexpr std::size_t kFirstRows = 1024;
  static constexpr std::size_t kMostRows = std::size_t{1} << 18;

  Part& room();
  std::uint64_t end_of(std::size_t run) const noexcept {
    return run + 1 < runs_.size() ? runs_[run + 1].first_row : rows_;
  }

  std::vector<Part> parts_;
  std::vector<Run> runs_;
  EventRecord last_;
  std::size_t rows_ = 0;
  bool all_sole_ = true;
};

}  // namespace understudy
