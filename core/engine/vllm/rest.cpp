// Resting: steps that concern nobody outside are not played before somebody has to know.
#include "engine/vllm/engine.hpp"
#include "engine/vllm/leap.hpp"

namespace understudy {

namespace {

// Transfers may have come further than the steps that are played meanwhile.
class CatchingUp {
 public:
  explicit CatchingUp(bool& on) : on_(on) { on_ = true; }
  ~CatchingUp() { on_ = false; }
  CatchingUp(const CatchingUp&) = delete;
  CatchingUp& operator=(const CatchingUp&) = delete;

 private:
  bool& on_;
};

}  // namespace

std::optional<std::int64_t> VllmEngine::rest(std::int64_t now_ns) {
  new_effects();
  if (!leap_->open()) {
    if (!leaping_ || !tiers_ || offload_ || tiers_->has_ready() || !leap_->possible()) return std::nullopt;
    landing_wait_.on = false;
    now_ns_ = now_ns;
    leap_->open_now();
  }
  read_input(now_ns);
  const std::optional<std::int64_t> next_ns = leap_->go_on();
  if (next_ns) rested_step_ns_ = in_step_ ? now_ns_ : now_ns_ + leap_->step_ns();
  return next_ns;
}

const StepEffects& VllmEngine::catch_up(std::int64_t now_ns, bool landing) {
  new_effects();
  const CatchingUp here(catching_up_);
  const std::int64_t until_ns = landing ? now_ns - 1 : now_ns;
  const bool begins = leap_->open() && leap_->play_on(until_ns) && (landing || now_ns_ < now_ns);
  const bool begun = begins && leap_->open() && leap_->begin_step();
  if (!begun && !leap_->open()) {
    play(until_ns, false, Last::Open);
    if (landing && !in_step_) (void)begin_step(now_ns_);
  }
  return hand_out();
}

const StepEffects& VllmEngine::rest_on(std::int64_t now_ns) {
  new_effects();
  const CatchingUp here(catching_up_);
  if (leap_->open() && leap_->play_on(now_ns - 1)) {
    rested_step_ns_ = now_ns_ + leap_->step_ns();
  } else {
    play(now_ns - 1, false, Last::Open);
  }
  return hand_out();
}

}  // namespace understudy
