// vLLM's prefill_schedule_interval: while requests decode, prompts are computed in every Nth step only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/vllm/live_request.hpp"

namespace understudy {

class PrefillInterval {
 public:
  // A schedule begins: decides whether it defers prompts. Nothing changes before `end`.
  void begin(std::uint32_t interval, std::span<const RequestSlot> running, const std::vector<EngineRequest>& requests) {
    interval_ = interval;
    carries_ = admitted_ = false;
    defers_ = interval > 1 && !bound_ && executed_ + 1 < last_ + interval &&
              std::ranges::any_of(running, [&](RequestSlot slot) { return !requests[slot].prefilling; });
  }
  bool defers() const noexcept { return defers_; }
  // The schedule computes a part of a prompt.
  void carry() noexcept { carries_ = true; }
  // Requests were admitted; `left`: some stay in the queue that were not passed over.
  void admitted(bool left) noexcept {
    admitted_ = true;
    left_ = left;
  }
  void end(bool computes) noexcept {
    if (interval_ <= 1) return;
    if (admitted_ && !defers_) bound_ = left_;
    if (computes) ++executed_;
    if (carries_) last_ = executed_;
  }
  // Steps that only decode have run, with nothing in the queue.
  void decoded(std::uint64_t steps) noexcept {
    if (steps == 0) return;
    executed_ += static_cast<std::int64_t>(steps);
    bound_ = false;
  }

 private:
  std::int64_t interval_ = 1;
  std::int64_t executed_ = 0;                     // schedules that computed something
  std::int64_t last_ = -(std::int64_t{1} << 32);  // the last of them with a prompt
  bool bound_ = false;                            // requests are left waiting: nothing is deferred
  bool defers_ = false;
  bool carries_ = false;
  bool admitted_ = false;
  bool left_ = false;
};

}  // namespace understudy
