// The plays of a run: which requests wait, for how many others, and when they may arrive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace understudy {

// What requests wait for, one row per request: a request arrives at the latest of its play's start plus
// `not_before_ns`, and of the events of the requests it waits for plus their delays. The arrays outlive the run.
struct GraphColumns {
  std::span<const std::int32_t> play;  // numbered from 0; empty: there is no graph
  std::span<const std::int64_t> not_before_ns;
  std::span<const std::int64_t> dependency_offsets;  // one more than rows
  std::span<const std::int64_t> dependency_rows;     // the request that is waited for
  std::span<const std::uint8_t> dependency_triggers;
  std::span<const std::int64_t> dependency_delay_ns;
  std::span<const std::uint8_t> dependency_relations;  // why: of no effect on arrivals

  static constexpr std::uint8_t kSpawn = 1;  // value of `dependency_relations`: another session starts this one

  bool empty() const noexcept { return play.empty(); }
};

class PlayStates {
 public:
  enum class Event : std::uint8_t { Dispatch, Completion };  // values of `dependency_triggers`

  // A request that nothing holds back any more.
  struct Released {
    std::uint64_t row = 0;
    std::int64_t arrival_ns = 0;
  };

  explicit PlayStates(const GraphColumns& graph);

  std::size_t plays() const noexcept { return left_.size(); }
  bool ended(std::size_t play) const { return left_[play] == 0; }
  std::size_t play_of(std::uint64_t row) const { return static_cast<std::size_t>(graph_.play[row]); }

  // The requests that a play's start, or an event of a request, releases; valid until the next call.
  std::span<const Released> start(std::size_t play, std::int64_t time_ns);
  std::span<const Released> on_event(std::uint64_t row, Event event, std::int64_t time_ns);
  // Requests of the play that are not released yet come that much earlier, but not before now.
  void bring_forward(std::size_t play, std::int64_t by_ns, std::int64_t now_ns);

 private:
  void release_if_free(std::uint64_t row);

  GraphColumns graph_;
  std::vector<std::size_t> first_row_;        // by play, and one more: offsets into `rows_`
  std::vector<std::uint64_t> rows_;           // of all plays
  std::vector<std::size_t> first_dependent_;  // by row, and one more: offsets into `dependents_`
  std::vector<std::uint64_t> dependents_;     // requests that wait for a row
  std::vector<std::size_t> dependent_edge_;   // and their dependency
  std::vector<std::uint32_t> waits_;          // by row: events still to come
  std::vector<std::int64_t> earliest_ns_;     // by row, by all events so far
  std::vector<std::size_t> left_;             // by play: requests that have not ended
  std::vector<Released> released_;
};

}  // namespace understudy
