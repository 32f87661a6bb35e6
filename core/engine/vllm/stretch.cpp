// Stretches of deferred steps: steps that nothing outside can observe run when something outside needs their result.
#include <utility>

#include "engine/vllm/engine.hpp"
#include "engine/vllm/fast_forward.hpp"

namespace understudy {

namespace {

// While this object exists, transfers may be ahead of the steps that run.
class BehindTransfers {
 public:
  explicit BehindTransfers(bool& on) : on_(on) { on_ = true; }
  ~BehindTransfers() { on_ = false; }
  BehindTransfers(const BehindTransfers&) = delete;
  BehindTransfers& operator=(const BehindTransfers&) = delete;

 private:
  bool& on_;
};

}  // namespace

const Effects& VllmEngine::begin_stretch(std::int64_t now_ns) {
  clear_returned_effects();
  if (!defer_steps(now_ns)) begin_one_step(now_ns);
  return return_effects();
}

// Opens a stretch, or a step of it that is visible outside. False: an ordinary step must follow.
bool VllmEngine::defer_steps(std::int64_t now_ns) {
  if (!fast_forward_->open()) {
    if (!fast_forwards_ || !tiers_ || offload_ || tiers_->has_ready() || !can_fast_forward()) return false;
    landing_wait_.on = false;
    clock_.now_ns = now_ns;
    fast_forward_->open_stretch();
  }
  read_input(now_ns);
  const std::optional<std::int64_t> end_ns = fast_forward_->next_stretch();
  if (!end_ns) return false;
  first_deferred_end_ns_ = clock_.in_step ? clock_.now_ns : clock_.now_ns + fast_forward_->step_ns();
  if (clock_.in_step) return true;
  stretch_end_ns_ = *end_ns;
  watch_landings(true);
  return true;
}

// End the stretch: run its steps up to `now_ns`. A step that has not ended is open then; before a landing, so is one
// that ends at `now_ns`.
void VllmEngine::run_deferred_steps(std::int64_t now_ns, bool before_landing) {
  watch_landings(false);
  const BehindTransfers behind(behind_transfers_);
  const std::int64_t until_ns = before_landing ? now_ns - 1 : now_ns;
  const bool begins =
      fast_forward_->open() && fast_forward_->run_until(until_ns) && (before_landing || clock_.now_ns < now_ns);
  const bool begun = begins && fast_forward_->open() && fast_forward_->begin_step();
  if (begun || fast_forward_->open()) return;
  play(until_ns, {});
  if (before_landing && !clock_.in_step) begin_one_step(clock_.now_ns);
}

// Run the steps that ended before `now_ns`, when a transfer lands that only samples show. The stretch continues, unless
// a step is open.
void VllmEngine::run_deferred_samples(std::int64_t now_ns) {
  const BehindTransfers behind(behind_transfers_);
  if (fast_forward_->open() && fast_forward_->run_until(now_ns - 1)) {
    first_deferred_end_ns_ = clock_.now_ns + fast_forward_->step_ns();
  } else {
    play(now_ns - 1, {});
  }
  if (clock_.in_step) watch_landings(false);
}

void VllmEngine::close_stretch() {
  if (deferred_) watch_landings(false);
  fast_forward_->close();
}

void VllmEngine::watch_landings(bool on) {
  deferred_ = on;
  tiers_->watch_landings(on);
}

void VllmEngine::set_before_landing(std::function<void(bool samples_only)> before) {
  if (!tiers_) return;
  tiers_->set_before_landing([this, before = std::move(before)](std::int64_t time_ns, bool samples_only) {
    if (!samples_only || first_deferred_end_ns_ < time_ns) before(samples_only);
  });
}

}  // namespace understudy
