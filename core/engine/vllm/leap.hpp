// A run of decode steps, without a turn for every request in every step. Same result as stepping, to the byte.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/vllm/engine.hpp"

namespace understudy {

// The members of a leap are the requests that run. A member has a turn when its step begins a block, fills one, or is
// its last; a step without turns changes the clock and the context, and nothing else. A member whose next block has to
// wait for a copy pauses, while the others go on. Asynchronously (without tiers) a step schedules the token after the
// one that it computes.
class VllmEngine::Leap {
 public:
  Leap(VllmEngine& engine, std::int64_t until_ns, bool stop_on_finish);

  // Steps that end by `until_ns`; false when there was none, and an ordinary step must follow.
  bool play();

 private:
  void play_steps();
  void plan_next();

  // Of a member, by its place in the running list:
  EngineRequest& request(std::uint32_t order) const { return engine_.requests_[scratch_.members[order]]; }
  std::uint32_t computed_by(std::uint32_t order, std::uint64_t step) const;
  // Tokens that blocks with a key may hold, once the step is scheduled.
  std::uint32_t filled_by(std::uint32_t order, std::uint64_t step) const {
    return computed_by(order, step) + (ahead_ ? 0 : 1);
  }
  bool lacks_block(std::uint32_t order, std::uint32_t computed) const;
  void enter(std::uint32_t order);
  void push_turn(std::uint32_t order, std::uint64_t from);
  void settle(std::uint32_t order);
  void pause(std::uint32_t order);
  bool serve(std::uint32_t order);
  bool begins_block(std::uint32_t order) const;
  void key_block(std::uint32_t order, std::uint32_t full);

  bool resume_paused();
  bool play_plain_steps(std::uint64_t until_step);
  bool play_turns();
  std::uint64_t gather_due();
  bool end_step(std::uint64_t fresh);
  bool sleep();
  std::int64_t step_ns() const;
  std::size_t running() const { return alive_ + scratch_.paused.size(); }

  VllmEngine& engine_;
  LeapScratch& scratch_;
  const std::uint32_t size_;  // of a block
  const bool ahead_;          // asynchronous: a batch is planned behind the one that runs
  const std::int64_t until_ns_;
  const bool stop_on_finish_;
  const std::uint64_t base_;  // the first step, in the token log
  std::uint64_t steps_ = 0;   // completed in this leap
  std::uint64_t alive_ = 0;   // members that decode
  std::uint64_t context_ = 0;
  bool ordinary_ = false;  // the step at hand is not for a leap: it may admit the head of the queue, or waste a token
};

}  // namespace understudy
