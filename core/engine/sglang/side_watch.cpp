// State of one side of a disaggregated server, as its engine sees it.
#include <algorithm>

#include "engine/sglang/scheduler.hpp"

namespace understudy {

std::size_t SglangScheduler::num_waiting() const noexcept {
  return waiting_.size() + side_.bootstrap.size() + side_.retracted.size() +
         (is_prefill_side() ? 0 : side_.moving.size());
}

std::uint64_t SglangScheduler::pages_in_flight() const noexcept {
  if (!is_prefill_side()) return 0;
  std::uint64_t tokens = 0;
  for (const SglangRequest* const request : side_.moving) tokens += static_cast<std::uint64_t>(up(request->kv));
  return tokens / page();
}

std::array<std::size_t, 8> SglangScheduler::side_counts() const noexcept {
  return {side_.bootstrap.size(), side_.moving.size(), side_.held.size(), side_.retracted.size(),
          waiting_.size(),        running_.size(),     side_.buffers,     free_slots_};
}

bool SglangScheduler::is_side_stuck() const noexcept {
  if (!running_.empty() || !side_.held.empty()) return false;
  // Behind a retracted request nothing is polled, so that what arrives does not help.
  if (!side_.retracted.empty()) return waiting_.empty();
  if (!side_.moving.empty()) return false;
  if (is_prefill_side()) return !waiting_.empty() || chunked_ != nullptr;
  return std::ranges::any_of(side_.bootstrap, &SglangRequest::is_ready);
}

bool SglangScheduler::only_decodes() const noexcept {
  return settings_.side.role == SglangRole::Decode && side_.bootstrap.empty() && side_.retracted.empty() &&
         side_.held.empty() && (waiting_.empty() || running_.size() >= settings_.max_running_requests);
}

std::int64_t SglangScheduler::steps_with_room() const noexcept {
  const auto requests = static_cast<std::int64_t>(running_.size() + waiting_.size() + side_.moving.size());
  if (requests == 0) return std::int64_t{1} << 31;
  return std::max<std::int64_t>((avail_ + evictable()) / (page() * requests) - 2, 0) * page();
}

}  // namespace understudy
