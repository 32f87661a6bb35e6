// Requests that wait for others: a play starts, and its requests arrive when nothing holds them back.
#include <algorithm>
#include <numeric>

#include "replay/fleet.hpp"

namespace understudy {

// Open loop: every play starts at its own time. Closed loop: so many at a time, in the order of the workload.
void Fleet::open_plays() {
  plays_.emplace(workload_.graph);
  play_order_.resize(plays_->plays());
  std::iota(play_order_.begin(), play_order_.end(), std::size_t{0});
  if (config_.concurrency > 0) {
    while (next_play_ < std::min<std::size_t>(config_.concurrency, play_order_.size())) start_play(0);
    return;
  }
  std::vector<std::int64_t> start_ns(plays_->plays());
  for (std::uint64_t row = 0; row < workload_.size(); ++row) start_ns[plays_->play_of(row)] = workload_.arrival_ns[row];
  std::ranges::stable_sort(play_order_, {}, [&](std::size_t play) { return start_ns[play]; });
  while (next_play_ < play_order_.size()) start_play(start_ns[play_order_[next_play_]]);
}

// Starts the next play.
void Fleet::start_play(std::int64_t time_ns) { push_released(plays_->start(play_order_[next_play_++], time_ns)); }

void Fleet::push_released(std::span<const PlayStates::Released> released) {
  for (const PlayStates::Released& one : released) push_arrival(one.arrival_ns, one.row);
}

// Records the arrival of a request now, and plans those that follow from it.
void Fleet::mark_arrival(std::uint64_t row) {
  arrival_ns_[row] = now_ns_;
  if (plays_) {
    push_released(plays_->on_event(row, PlayStates::Event::Dispatch, now_ns_));
  } else if (config_.concurrency == 0 && workload_.turn[row] == 0) {
    push_next_arrival();
  }
}

void Fleet::end_in_play(std::uint64_t row, std::int64_t time_ns) {
  push_released(plays_->on_event(row, PlayStates::Event::Completion, time_ns));
  const bool is_last = plays_->ended(plays_->play_of(row));
  if (is_last && config_.concurrency > 0 && next_play_ < play_order_.size())
    start_play(time_ns + config_.turnaround_ns);
}

}  // namespace understudy
