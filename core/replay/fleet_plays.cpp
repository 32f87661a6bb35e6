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
  if (config_.play_limits.caps_idle()) play_clock_.in_flight.resize(plays_->plays());
  if (config_.concurrency == 0) {
    std::vector<std::int64_t> start_ns(plays_->plays());
    for (std::uint64_t row = 0; row < workload_.size(); ++row) {
      start_ns[plays_->play_of(row)] = workload_.arrival_ns[row];
    }
    std::ranges::stable_sort(play_order_, {}, [&](std::size_t play) { return start_ns[play]; });
    while (next_play_ < play_order_.size()) start_play(start_ns[play_order_[next_play_]]);
    return;
  }
  play_clock_.preparing = std::min<std::size_t>(config_.play_limits.preparing_plays, play_order_.size());
  for (std::size_t left = play_clock_.preparing; left > 0; --left) start_play(0);
  if (play_clock_.preparing == 0) open_profile(0);
}

// All lanes begin.
void Fleet::open_profile(std::int64_t time_ns) {
  const PlayLimits& limits = config_.play_limits;
  play_clock_.begin_ns = time_ns;
  if (limits.duration_ns > 0) {
    play_clock_.end_ns = time_ns + limits.duration_ns;
    queue_.push(play_clock_.end_ns + limits.grace_ns, EventClass::Abort, workload_.size(), workload_.size());
  }
  for (std::uint32_t lane = 0; lane < config_.concurrency; ++lane) start_next_play(time_ns);
}

// Starts the next play.
void Fleet::start_play(std::int64_t time_ns) {
  const std::size_t play = play_order_[next_play_++];
  if (config_.play_limits.caps_idle()) play_clock_.running_plays.insert(play);
  push_released(plays_->start(play, time_ns));
}

void Fleet::start_next_play(std::int64_t time_ns) {
  if (time_ns >= play_clock_.end_ns) return;
  if (next_play_ < play_order_.size()) return start_play(time_ns);
  ++play_clock_.idle_lanes;
}

void Fleet::push_released(std::span<const PlayStates::Released> released) {
  for (const PlayStates::Released& one : released) push_arrival(one.arrival_ns, one.row);
}

// Whether the time in which requests arrive is over.
bool Fleet::comes_too_late(std::uint64_t row) const {
  return plays_ && arrival_ns_[row] < 0 && now_ns_ >= play_clock_.end_ns;
}

// Records the arrival of a request now, and plans those that follow from it.
void Fleet::mark_arrival(std::uint64_t row) {
  arrival_ns_[row] = now_ns_;
  if (sessions_) wake_session(row);
  if (plays_) {
    if (config_.play_limits.caps_idle()) {
      ++play_clock_.in_flight[plays_->play_of(row)];
      ++play_clock_.total_in_flight;
    }
    push_released(plays_->on_event(row, PlayStates::Event::Dispatch, now_ns_));
  } else if (config_.concurrency == 0 && workload_.turn[row] == 0) {
    push_next_arrival();
  }
}

void Fleet::end_in_play(std::uint64_t row, std::int64_t time_ns) {
  push_released(plays_->on_event(row, PlayStates::Event::Completion, time_ns));
  const std::size_t play = plays_->play_of(row);
  const bool is_last = plays_->ended(play);
  if (config_.play_limits.caps_idle()) {
    --play_clock_.in_flight[play];
    --play_clock_.total_in_flight;
    if (is_last) play_clock_.running_plays.erase(play);
  }
  if (is_last && play_clock_.preparing > 0) {
    if (--play_clock_.preparing == 0) open_profile(time_ns);
  } else if (is_last && config_.concurrency > 0) {
    start_next_play(time_ns + config_.turnaround_ns);
  }
  if (config_.play_limits.caps_idle()) cap_idle_time(play);
}

// The time for answers is over: clients abort the requests that run.
void Fleet::cancel_rest() {
  for (std::uint64_t row = 0; row < workload_.size(); ++row) {
    if (arrival_ns_[row] >= 0) abort(row);
  }
}

// ── Idle time ──

// Brings the next arrival of a play in which no request runs forward, and then that of all plays.
void Fleet::cap_idle_time(std::size_t play) {
  const auto cap = [this](std::optional<std::size_t> of, std::int64_t cap_ns) {
    std::int64_t next_ns = PlayClock::kNever;
    for (const auto& [row, due] : play_clock_.due) {
      if (!of || plays_->play_of(row) == *of) next_ns = std::min(next_ns, due.time_ns);
    }
    if (next_ns != PlayClock::kNever && next_ns - now_ns_ > cap_ns) bring_forward(of, next_ns - now_ns_ - cap_ns);
  };
  const PlayLimits& limits = config_.play_limits;
  if (limits.play_idle_ns > 0 && play_clock_.in_flight[play] == 0) cap(play, limits.play_idle_ns);
  if (limits.fleet_idle_ns > 0 && play_clock_.total_in_flight == 0) cap(std::nullopt, limits.fleet_idle_ns);
}

void Fleet::bring_forward(std::optional<std::size_t> play, std::int64_t by_ns) {
  for (auto& [row, due] : play_clock_.due) {
    if (play && plays_->play_of(row) != *play) continue;
    cancel_entry(due.handle);
    due.time_ns = std::max(now_ns_, due.time_ns - by_ns);
    due.handle = queue_.push(due.time_ns, EventClass::Arrival, row, row);
  }
  if (play) return plays_->bring_forward(*play, by_ns, now_ns_);
  for (const std::size_t running : play_clock_.running_plays) plays_->bring_forward(running, by_ns, now_ns_);
}

}  // namespace understudy
