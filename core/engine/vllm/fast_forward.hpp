// Fast-forward over decode steps, without work for every request in every step. Results equal stepping, to the byte.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "engine/vllm/decode_state.hpp"
#include "engine/vllm/decode_sums.hpp"

namespace understudy {

// The engine decides whether a fast-forward is possible (VllmEngine::why_step). Its members are the running
// requests. A member has an event when its step begins a block, fills one, is its last, or is the last that
// reads less than the model's window; a step without events changes only the clock and the context. A member whose next
// block has to wait for a copy pauses while the others continue. Asynchronously a step schedules the token after the
// one that it computes: a pausing member still has the token of the current step, and a rejoining one is computed from
// the next step on.
class FastForward {
 public:
  FastForward(const DecodeState& state, DecodeHost& host)
      : state_(state), host_(host), clock_(state.clock), size_(state.config.block_size), sums_(*state.timing.model) {}

  // Run steps that end by `until_ns`; false when there was none, and an ordinary
  // step must follow.
  bool play(std::int64_t until_ns, bool stop_on_finish);

  // A fast-forward may end after taking blocks for a step that only an ordinary step can decide. That step has begun:
  // no transfer lands before it.
  bool has_begun(std::int64_t now_ns) const noexcept { return begun_ns_ == now_ns; }
  void forget_begun() noexcept { begun_ns_ = -1; }

  // The last one ended because its next step would end after its time.
  bool out_of_time() const noexcept { return out_of_time_; }

 private:
  using Room = KvBackend::Room;

  struct MemberEvent {
    std::uint64_t step;
    std::uint32_t order;  // place in the running list when the fast-forward began
    bool operator>(const MemberEvent& other) const { return std::tie(step, order) > std::tie(other.step, other.order); }
  };

  std::int64_t step_ns() const;  // duration of the next step
  void start(std::int64_t until_ns, bool stop_on_finish);
  void play_steps();
  void update_requests();
  void plan_next();
  void count_schedules();
  void forget_finished();

  // A member, by its place in the running list (fast_forward_members.cpp):
  EngineRequest& request(std::uint32_t order) const { return state_.requests[members_[order]]; }
  bool computes(std::uint32_t order) const noexcept { return out_[order] == kIn || out_[order] == kPausing; }
  std::uint32_t computed_by(std::uint32_t order, std::uint64_t step) const {
    return static_cast<std::uint32_t>(request(order).num_computed_tokens + (step - since_[order]));
  }
  // Tokens that the member reads in `step`.
  std::uint64_t known_by(std::uint32_t order, std::uint64_t step) const {
    return request(order).known + (step - since_[order]);
  }
  // Tokens that blocks with a name may hold, once the step is scheduled.
  std::uint32_t filled_by(std::uint32_t order, std::uint64_t step) const {
    return computed_by(order, step) + (ahead_ && out_[order] != kRejoining ? 0 : 1);
  }
  bool begins_block(std::uint32_t order) const;
  void join(std::uint32_t order);
  MemberEvent event_of(std::uint32_t order, std::uint64_t from) const;  // next event of a member
  std::uint64_t next_block(std::uint32_t order, std::uint64_t from) const;
  void push_event(std::uint32_t order, std::uint64_t from);
  void update_request(std::uint32_t order);
  void pause(std::uint32_t order);
  void pause_and_rejoin();
  void find_longest(std::uint64_t step);
  bool resume_paused();
  bool serve(std::uint32_t order);
  void name_filled(std::uint32_t order, std::uint32_t full);

  bool interrupted();
  bool play_plain_steps(std::uint64_t until_step);
  std::span<const std::int64_t> ends_in_time(std::span<std::int64_t> durations_ns, std::int64_t now_ns);
  bool play_events();
  void serve_or_pause();
  void apply_events(bool served);
  std::uint64_t gather_due();
  bool end_step();
  bool wait_for_landing();
  bool in_time(std::int64_t begin_ns, std::int64_t end_ns) const noexcept {
    return begin_ns < until_ns_ && end_ns <= until_ns_;
  }
  std::size_t running() const { return sums_.requests() + paused_.size(); }

  const DecodeState state_;
  DecodeHost& host_;
  StepClock& clock_;
  const std::uint32_t size_;    // block size, tokens
  std::int64_t begun_ns_ = -1;  // start of a step that has begun but was not run; -1: none

  // State of the current fast-forward.
  bool ahead_ = false;             // asynchronous: a batch is planned behind the one that runs
  bool names_on_receipt_ = false;  // set by the backend
  std::int64_t until_ns_ = 0;
  bool stop_on_finish_ = false;
  bool out_of_time_ = false;
  std::uint64_t base_ = 0;     // the first step, in the token log
  std::uint64_t steps_ = 0;    // completed
  std::uint64_t counted_ = 0;  // steps already added to the engine's counts
  DecodeSums sums_;            // over members that decode
  bool ordinary_ = false;      // this step needs an ordinary one: it may admit the head of the queue, or waste a token
  std::vector<RequestSlot> members_;
  std::vector<std::uint64_t> since_;  // steps already applied to each request
  std::vector<std::uint64_t> last_;   // last step of each
  enum : std::uint8_t {
    kIn,
    kOut,  // ended, or waits for room
    // Asynchronously:
    kPausing,    // waits, but has the token of the current step
    kRejoining,  // waits no longer: the current step schedules it for the next
  };
  std::vector<std::uint8_t> out_;         // one of these per member
  std::vector<std::uint32_t> paused_;     // members that wait or rejoin
  std::vector<std::uint32_t> rejoining_;  // members that the current step has scheduled
  std::vector<MemberEvent> events_;       // a heap, the next first
  std::vector<std::uint32_t> due_;        // members with an event in the current step
  std::vector<std::uint32_t> done_;       // due members that are finished with it, or pause
  std::vector<Scheduled> filled_;         // requests whose block is complete
};

}  // namespace understudy
