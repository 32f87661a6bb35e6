// Runs of plain decode steps, without a turn for every request in every step. Same result, to the byte.
#include <algorithm>
#include <functional>

#include "engine/vllm_engine.hpp"

namespace understudy {

// Every running request decodes, and nobody can be admitted until one of them ends.
bool VllmEngine::can_leap() const {
  if (shared_ && tiers_) return false;              // sealed blocks go down a step later than a leap would send them
  if (config_.check || bursts_.on()) return false;  // requests are settled where a leap ends, not after each step
  if (config_.async_scheduling || in_step_ || running_.empty() || running_.size() > config_.max_num_batched_tokens) {
    return false;
  }
  if (tiers_ && !waiting_.empty() && blocked_.released != tiers_->released()) return false;
  if (!waiting_.empty() && !blocked_.valid && running_.size() < config_.max_num_seqs &&
      running_.size() < config_.max_num_batched_tokens) {
    return false;
  }
  return std::all_of(running_.begin(), running_.end(), [this](RequestId id) {
    if (tiers_ && tiers_->waiting(id)) return false;
    const EngineRequest& r = requests_[id];
    return r.computed + 1 == r.known && r.computed >= r.spec.prompt_tokens && !r.tokens.empty();
  });
}

std::uint32_t VllmEngine::outputs_left(const EngineRequest& request) const noexcept {
  return std::min(request.spec.max_tokens - request.outputs(), config_.max_model_len - request.known);
}

// Steps that end by `until_ns`; false when there was none, and an ordinary step must follow.
bool VllmEngine::leap(std::int64_t until_ns, bool stop_on_finish) {
  const std::uint32_t size = config_.block_size;
  std::vector<RequestId>& members = leap_.members;
  std::vector<std::uint64_t>& last = leap_.last;
  std::vector<std::uint8_t>& gone = leap_.gone;
  std::vector<Turn>& turns = leap_.turns;
  std::vector<std::uint32_t>& due = leap_.due;
  std::vector<std::uint32_t>& done = leap_.done;
  std::vector<StepLog::Scheduled>& filled = leap_.filled;
  members = running_;
  last.resize(members.size());
  gone.assign(members.size(), 0);
  turns.clear();
  std::uint64_t context = 0;
  const auto next_turn = [&](std::uint32_t order, std::uint64_t from) {
    const std::uint32_t into = static_cast<std::uint32_t>((requests_[members[order]].computed + from) % size);
    const std::uint64_t block = into == 0 ? from : from + (size - 1 - into);
    return std::min(block, last[order]);
  };
  for (std::uint32_t order = 0; order < members.size(); ++order) {
    const EngineRequest& request = requests_[members[order]];
    last[order] = outputs_left(request) - std::uint64_t{1};
    context += request.known;
    turns.push_back({next_turn(order, 0), order});
  }
  std::ranges::make_heap(turns, std::greater<>());

  const std::uint64_t base = token_log_.next_step();
  std::uint64_t alive = members.size();
  std::uint64_t steps = 0;  // completed in this leap
  const auto settle = [&](EngineRequest& request) {
    request.computed += static_cast<std::uint32_t>(steps);
    request.known += static_cast<std::uint32_t>(steps);
    request.emitted += static_cast<std::uint32_t>(steps);
    if (request.tokens.back().first_step + request.tokens.back().count == base) {
      request.tokens.back().count += static_cast<std::uint32_t>(steps);
    } else if (steps > 0) {
      request.tokens.push_back({base, static_cast<std::uint32_t>(steps)});
    }
  };

  // A step without a turn changes the clock and the context, and nothing else.
  const auto play_plain_steps = [&](std::uint64_t until_step) {
    const std::uint64_t first = steps;
    bool disturbed = false;
    while (steps < until_step && now_ns_ < until_ns && !disturbed) {
      const std::int64_t end_ns = now_ns_ + timing_.duration_ns({0, 0, 0, alive, context}, capacity_tokens_);
      if (end_ns > until_ns) break;
      now_ns_ = end_ns;
      ++steps;
      token_log_.end_step(end_ns);
      context += alive;
      disturbed = tiers_ && tiers_->hub().due(now_ns_) && leap_disturbed();
      if (token_log_.wants_sample()) sample(alive);
    }
    totals_.steps += steps - first;
    return steps == until_step;
  };

  while (alive > 0) {
    if ((tiers_ && leap_disturbed()) || !play_plain_steps(turns.front().step)) break;
    const std::int64_t end_ns = now_ns_ + timing_.duration_ns({0, 0, 0, alive, context}, capacity_tokens_);
    if (now_ns_ >= until_ns || end_ns > until_ns || (tiers_ && leap_disturbed())) break;
    due.clear();
    std::uint64_t fresh = 0;
    bool admits = false;
    while (!turns.empty() && turns.front().step == steps) {
      const std::uint32_t order = turns.front().order;
      std::ranges::pop_heap(turns, std::greater<>());
      turns.pop_back();
      due.push_back(order);
      EngineRequest& request = requests_[members[order]];
      const std::uint64_t computed = request.computed + steps;
      fresh += computed % size == 0 ? 1 : 0;
      if (!shared_ && blocked_.valid && blocked_.wants_key && config_.enable_prefix_caching &&
          (computed + 1) % size == 0) {
        need_identities(request, (computed + 1) / size);
        admits = admits || request.blocks[computed / size].lineage == blocked_.missing;
      }
    }
    // Only multi_lru may evict a block before those that continue it. Then the head of the queue finds less, so less
    // has to be held for it, and it may fit.
    if (shared_ && config_.eviction_policy == PolicyKind::MultiLru && blocked_.valid) admits = admits || fresh > 0;
    // A preemption, or a hit that the head of the queue has been waiting for: an ordinary step decides.
    if (admits || (fresh > 0 && !leap_has_room(fresh))) break;

    begun_ns_ = now_ns_;
    now_ns_ = end_ns;
    done.clear();
    filled.clear();
    for (const std::uint32_t order : due) {
      EngineRequest& request = requests_[members[order]];
      const auto computed = static_cast<std::uint32_t>(request.computed + steps);
      if (computed % size == 0) (void)take_blocks(members[order], 1, begun_ns_);
      if (!shared_ && config_.enable_prefix_caching && (computed + 1) % size == 0) {
        const std::uint32_t full = (computed + 1) / size;
        need_identities(request, full);
        store_.commit(0, std::span<SlotId>(request.table).subspan(full - 1, 1),
                      std::span<const BlockIdentity>(request.blocks).subspan(full - 1, 1));
        request.keyed = full;
        if (tiers_) filled.push_back({members[order], 0, false});
      }
      if (last[order] == steps) {
        done.push_back(order);
      } else {
        turns.push_back({next_turn(order, steps + 1), order});
        std::ranges::push_heap(turns, std::greater<>());
      }
    }
    ++steps;
    if (tiers_) {
      tiers_->hub().run_until(end_ns);
      write_through(filled, end_ns);
    }
    ++totals_.steps;
    token_log_.end_step(now_ns_);
    bool sealed = false;
    const auto seal = [&](std::uint32_t order) {
      EngineRequest& request = requests_[members[order]];
      const auto computed = static_cast<std::uint32_t>(request.computed + steps);
      if (computed % size != 0) return;
      seal_blocks(request, computed / size);
      sealed = true;
    };
    // Under kvbm, tokens are received in turn: a block is sealed, or a request ends, before the next one's.
    for (const std::uint32_t order : shared_ ? due : done) {
      if (shared_) seal(order);
      if (last[order] + 1 != steps) continue;
      EngineRequest& request = requests_[members[order]];
      settle(request);
      context -= request.known - 1;  // what it added to the context of this step
      retire(request);
      gone[order] = 1;
      complete(members[order], now_ns_);
    }
    alive -= done.size();
    context += alive;
    if (!done.empty()) blocked_.valid = false;
    // A block that is full counts as it did; on the host it may push others out.
    if (fresh > 0 || !done.empty() || sealed || tiers_ || token_log_.wants_sample()) sample(alive);
    close_step();
    if (sealed && blocked_.valid) {
      blocked_.valid = false;  // what was sealed may be what the head of the queue lacks, or may have freed a block
      if (!waiting_.empty()) break;
    }
    if (!done.empty() && (stop_on_finish || !waiting_.empty())) break;
  }

  for (std::uint32_t order = 0; order < members.size(); ++order) {
    if (gone[order] == 0) settle(requests_[members[order]]);
  }
  std::erase_if(running_, [this](RequestId id) { return requests_[id].status == RequestStatus::Finished; });
  if (steps > 0) fruitless_preemptions_ = 0;
  return steps > 0;
}

}  // namespace understudy
