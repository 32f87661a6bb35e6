// Room for the head of the queue: whether it fits, and how long a refusal stays valid.
#include <algorithm>

#include "engine/vllm/groups/block_groups.hpp"
#include "engine/vllm/scheduler.hpp"

namespace understudy {

bool Scheduler::fits(const Admission& head) { return head.has_loaded ? fits_behind(head) : fits_new(head); }

bool Scheduler::fits_new(const Admission& head) {
  EngineRequest& request = requests_[head.slot];
  const std::uint64_t free = kv_.available();
  const std::uint64_t watermark = running_.empty() ? 0 : watermark_blocks_;
  if (config_.scheduler_reserve_full_isl) {
    const std::uint64_t needs = kv_.whole_cost(request, head.hit, request.known) + watermark;
    if (needs > free) {
      refusal_.lacks = needs - free;
      refusal_.needs = needs;
      return false;
    }
  }
  const std::uint64_t needs = kv_.cost(request, head.hit, room_up_to(request, head.total(), true)) + watermark;
  // States split a prompt by the budget, and a chunk of another length may need less.
  if (grouped_ != nullptr && !grouped_->layout().has_states) refusal_.needs = needs;
  return needs <= free;
}

// For a request that holds the blocks of its load.
bool Scheduler::fits_behind(const Admission& head) const {
  const EngineRequest& request = requests_[head.slot];
  const std::uint64_t watermark = running_.empty() ? 0 : watermark_blocks_;
  if (grouped_ != nullptr) {
    return grouped_->blocks()->fits_behind(request, room_up_to(request, head.total(), true), watermark,
                                           config_.scheduler_reserve_full_isl);
  }
  const auto fit = [&](std::uint32_t tokens) { return kv_.lacks(request, tokens) + watermark <= kv_.available(); };
  if (config_.scheduler_reserve_full_isl && !fit(request.known)) return false;
  return fit(room_up_to(request, head.total(), true));
}

// Leave the head in the queue; record whether the refusal stays valid for the next steps.
void Scheduler::refuse(const Admission& head) {
  refusal_.no_room = !head.too_long;
  if (grouped_ != nullptr) {
    // Until blocks that windows leave behind suffice, a part of the hit is evicted, or keys are added that it may find.
    refusal_.stands =
        tiers_ == nullptr && !head.too_long && refusal_.needs > 0 && refusal_.needs < GroupedBackend::kImpossible;
    if (refusal_.stands) refusal_.evictions = grouped_->evictions_until_lost();
    return;
  }
  // While the others decode, free blocks only decrease, whatever the eviction order: each block taken is one fewer
  // free, and reduces what this request needs by at most one, because an evicted hit and the hits behind it must be
  // computed. The budget, however, may have been used by prompts of this step only. Asynchronously, a request whose
  // last token is in flight uses no budget.
  refusal_.stands =
      !head.too_long || (!config_.async_scheduling && head.wanted + running_.size() > config_.max_num_batched_tokens);
  // A hit that is evicted takes those behind it along, and a chunk without them may need less than it did.
  if (head.hit.unreferenced > 0 && !config_.scheduler_reserve_full_isl) refusal_.stands = false;
  refusal_.wants_block = head.hit.tokens < head.limit;
  if (refusal_.wants_block) {
    refusal_.missing = kv_.hash_of(requests_[head.slot], head.hit.tokens / config_.block_size);
  }
}

// The head fits, and yet its blocks cannot be taken: some are being copied.
void Scheduler::refuse_room() {
  refusal_.stands = grouped_ == nullptr;
  refusal_.no_room = true;
}

// Whether the head's next block waits for a copy.
bool Scheduler::waits_for_copies(const EngineRequest& request) {
  if (tiers_ == nullptr || kv_.holds(request) || !tiers_->waiting(request.slot)) return false;
  refusal_.stands = true;
  return true;
}

bool Scheduler::head_may_move() const { return refusal_.released != tiers_->released() && !head_stays(); }

bool Scheduler::head_stays() const {
  const std::optional<RequestSlot> head = waiting_.candidate();
  return !head || tiers_->waiting(*head) || head_lacks_room();
}

// A block taken by another request is one fewer free, and reduces what the head needs by at most one (see `refuse`):
// only blocks released by tiers help it.
bool Scheduler::head_lacks_room() const {
  return refusal_.stands && tiers_->released() - refusal_.released < refusal_.lacks &&
         refusal_.loads_ended == tiers_->loads_ended();
}

// A request lacks room: the oldest hold of a sleeping session ends. False: there is none.
bool Scheduler::yield_hold(std::int64_t now_ns) {
  std::optional<KvRequest> held = held_.take_oldest(now_ns);
  if (!held) return false;
  kv_.release(*held);
  refusal_ = {};  // what the head lacked before
  return true;
}

}  // namespace understudy
