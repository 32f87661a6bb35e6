// Which components a scheduler can have, and what their pools must add up to.
#include <algorithm>

#include "base/errors.hpp"
#include "engine/sglang/scheduler.hpp"

namespace understudy {

void SglangSettings::check_components() const {
  const auto refuse = [](const auto&... what) { throw Error(ErrorKind::ConfigError, what...); };
  const bool is_side = side.role != SglangRole::Unified;
  if (is_side && host) refuse("disaggregation_mode: a side with HiCache has no rules here; leave one of them out");
  if (side.polling_interval == 0) refuse("disaggregation_decode_polling_interval: 0; choose at least 1");
  if (!swa_window && !mamba_slots) return;
  if (swa_window && mamba_slots) {
    refuse("mamba_slots: SGLang's rules for windows and states in one model are not known here; leave out swa_window");
  }
  const char* const field = swa_window ? "swa_window" : "mamba_slots";
  if (is_side) refuse(field, ": disaggregated servers have no rules for windows and states here; leave out one");
  if (host) refuse(field, ": HiCache has no rules for windows and states here; leave out one of them");
  if (older_tree) refuse(field, ": SGLang's older tree has no windows and no states; use the unified one");
  if (swa_window && (*swa_window == 0 || swa_tokens == 0 || swa_tokens % page_size != 0)) {
    refuse("swa_tokens: a window of ", *swa_window, " tokens with ", swa_tokens, " for windows in pages of ", page_size,
           "; both must be positive, and the second whole pages");
  }
  if (mamba_track_interval == 0) refuse("mamba_track_interval: 0 tracks no state; choose at least 1");
  if (mamba_lazy && !mamba_extra_buffer) refuse("mamba_lazy: needs mamba_extra_buffer; set both, or none");
  if (mamba_slots && !mamba_extra_buffer && page_size > 1 && !disable_radix_cache) {
    refuse("mamba_extra_buffer: pages of ", page_size, " tokens need it; set it, or a page_size of 1");
  }
}

void SglangScheduler::check_components() const {
  if (!window_ && !states_) return;
  const RadixComponent& component = *this->component();
  component.check();
  std::int64_t held = 0;
  for (const auto& [id, request] : requests_) {
    if (states_) {
      held += (request->has_state ? 1 : 0) + request->tracking_slots;
    } else if (request->has_slot) {
      const std::int64_t tokens = up(request->kv);
      held += tokens - std::max<std::int64_t>(request->own, std::min<std::int64_t>(request->window_begin, tokens));
    }
  }
  const auto cached = static_cast<std::int64_t>(component.evictable() + component.locked());
  if (component.free() + held + cached != static_cast<std::int64_t>(component.size())) {
    throw Error(ErrorKind::InvariantViolated, component.free(), window_ ? " window tokens" : " state slots",
                " are free, ", held, " held by requests and ", cached, " cached; there are ", component.size());
  }
}

}  // namespace understudy
