// Members of a fast-forward: the blocks that each needs in the steps where it has an event.
#include <algorithm>
#include <functional>

#include "engine/vllm/fast_forward.hpp"

namespace understudy {

// Asynchronously a step schedules the token after the one that it computes, except after a member's last.
bool FastForward::begins_block(std::uint32_t order) const {
  if (ahead_ && last_[order] == steps_) return false;
  const std::uint32_t computed = computed_by(order, steps_);
  return computed % size_ == 0 && state_.kv.num_blocks(request(order)) * size_ <= computed;
}

void FastForward::join(std::uint32_t order) {
  since_[order] = steps_;
  last_[order] = steps_ + state_.outputs_left(request(order)) - 1;
  out_[order] = kIn;
  sums_.add(request(order).known);
}

FastForward::MemberEvent FastForward::event_of(std::uint32_t order, std::uint64_t from) const {
  const std::uint64_t block = next_block(order, from);
  const std::uint64_t known = known_by(order, from);
  const std::uint64_t window = sums_.window();
  // In the last step that reads less than the window.
  const std::uint64_t passes =
      window == TimingModel::kNoWindow || known >= window ? last_[order] : from + (window - 1 - known);
  return {std::min({block, last_[order], passes}), order};
}

// The step in which the member begins or fills a block.
std::uint64_t FastForward::next_block(std::uint32_t order, std::uint64_t from) const {
  const std::uint32_t computed = computed_by(order, from);
  if (state_.grouped != nullptr) return from + state_.grouped->steps_to_change(request(order), computed);
  const std::uint32_t into = computed % size_;
  // A step ahead, the filled block is named when the next is begun: in one event.
  return into == 0 ? from : from + (size_ - (ahead_ ? 0 : 1) - into);
}

void FastForward::push_event(std::uint32_t order, std::uint64_t from) {
  events_.push_back(event_of(order, from));
  std::ranges::push_heap(events_, std::greater<>());
}

// Apply the steps so far to the member's request.
void FastForward::update_request(std::uint32_t order) {
  EngineRequest& member = request(order);
  const std::uint64_t first = base_ + since_[order];
  const auto played = static_cast<std::uint32_t>(steps_ - since_[order]);
  member.num_computed_tokens += played;
  member.known += played;
  member.record.output_tokens += played;
  if (played > 0) state_.tokens.push_back({member.id, played});
  member.tokens.add(first, played);
  since_[order] = steps_;
  if (state_.grouped != nullptr) state_.grouped->skip_to(member, member.num_computed_tokens);
}

void FastForward::pause(std::uint32_t order) {
  update_request(order);
  if (ahead_) {  // the next token is not in flight
    --request(order).num_computed_tokens;
    request(order).ahead = 0;
  }
  out_[order] = kOut;
  sums_.remove(request(order).known);
  find_longest(steps_);
  paused_.push_back(order);
}

// A step ahead, after the step's end: members that must wait leave the next batch, and those that wait no longer join
// it.
void FastForward::pause_and_rejoin() {
  for (const std::uint32_t order : done_) {
    if (out_[order] == kPausing) pause(order);
  }
  for (const std::uint32_t order : rejoining_) {
    ++request(order).num_computed_tokens;
    request(order).ahead = 1;
    std::erase(paused_, order);
    join(order);
    push_event(order, steps_);
  }
  rejoining_.clear();
}

// Find the longest context among decoding members in `step`, after one has left.
void FastForward::find_longest(std::uint64_t step) {
  if (!state_.timing.model->wants_longest()) return;
  std::uint64_t longest = 0;
  for (std::uint32_t order = 0; order < members_.size(); ++order) {
    if (computes(order)) longest = std::max(longest, known_by(order, step));
  }
  sums_.set_longest(longest);
}

// Take the block that the member begins and name the one it fills. False: it must wait for the first.
bool FastForward::serve(std::uint32_t order) {
  if (state_.grouped != nullptr) {
    if (ahead_ && last_[order] == steps_) return true;
    const std::uint32_t position = computed_by(order, steps_);
    if (state_.grouped->decode(request(order), position, clock_.begun_ns) != Room::Taken) return false;
    if (state_.tiers && !state_.offloads) {
      filled_.push_back({members_[order], 1, position - (ahead_ ? 1 : 0), true, request(order).id});
    }
    return true;
  }
  if (begins_block(order) && state_.kv.add(request(order), clock_.begun_ns) != Room::Taken) return false;
  const std::uint32_t filled = filled_by(order, steps_);
  if (names_on_receipt_ || filled % size_ != 0 || (ahead_ && last_[order] == steps_)) return true;
  name_filled(order, filled / size_);
  return true;
}

void FastForward::name_filled(std::uint32_t order, std::uint32_t full) {
  EngineRequest& member = request(order);
  if (!state_.config.enable_prefix_caching || member.keyed == full) return;
  member.keyed_before = member.keyed;
  state_.kv.name(member, full * size_);
  if (state_.tiers) filled_.push_back({members_[order], 1, full * size_ - 1, true, member.id});
}

// False: one of them computes a prompt, which takes an ordinary step.
bool FastForward::resume_paused() {
  bool prefills = false;
  std::erase_if(paused_, [&](std::uint32_t order) {
    const RequestSlot id = members_[order];
    if (state_.tiers->waiting(id)) return false;
    prefills = prefills || !state_.requests[id].decodes();
    if (prefills) return false;
    if (ahead_) {  // this step schedules it: an event without a token
      out_[order] = kRejoining;
      since_[order] = steps_;
      last_[order] = steps_ + state_.outputs_left(request(order));
      events_.push_back({steps_, order});
      std::ranges::push_heap(events_, std::greater<>());
      return false;
    }
    join(order);
    push_event(order, steps_);
    return true;
  });
  return !prefills;
}

}  // namespace understudy
