#include "engine/vllm/rank_group.hpp"

#include <algorithm>
#include <utility>

namespace understudy {

namespace {

// The phase of a group is that of its rank with the highest.
int precedence(Phase phase) {
  switch (phase) {
    case Phase::Idle:
      return 0;
    case Phase::Asleep:
      return 1;
    case Phase::Ready:
      return 2;
    case Phase::InStep:
      return 3;
    case Phase::Stalled:
      return 4;
  }
  return 0;
}

}  // namespace

RankGroup::RankGroup(std::vector<std::unique_ptr<VllmEngine>> ranks) : ranks_(std::move(ranks)) {}

bool RankGroup::in_step() const {
  return std::ranges::any_of(ranks_, [](const auto& rank) { return rank->in_step(); });
}

void RankGroup::add(const Effects& effects) {
  effects_.tokens.insert(effects_.tokens.end(), effects.tokens.begin(), effects.tokens.end());
  for (const RequestRecord& record : effects.finished) {
    rank_of_.erase(record.id);
    effects_.finished.push_back(record);
  }
  effects_.has_events = effects_.has_events || effects.has_events;
}

const Effects& RankGroup::return_effects() {
  const EngineSnapshot now = snapshot();
  effects_.phase = now.phase;
  effects_.wake_ns = now.wake_ns;
  return effects_;
}

const Effects& RankGroup::submit(RequestSpec spec, std::int64_t now_ns) {
  const std::size_t rank = spec.rank;
  if (rank >= ranks_.size()) {
    throw Error(ErrorKind::InvalidArgument, "request ", spec.name, ": rank ", rank, " of ", ranks_.size());
  }
  const RequestId id = spec.id;
  effects_.clear();
  add(ranks_[rank]->submit(std::move(spec), now_ns));
  rank_of_[id] = rank;
  if (std::ranges::find(order_, rank) == order_.end()) order_.push_back(rank);
  return return_effects();
}

const Effects& RankGroup::cancel(RequestId id, std::int64_t now_ns) {
  effects_.clear();
  if (const auto found = rank_of_.find(id); found != rank_of_.end()) add(ranks_[found->second]->cancel(id, now_ns));
  return return_effects();
}

const Effects& RankGroup::begin_step(std::int64_t now_ns) {
  if (in_step()) throw Error(ErrorKind::WrongState, "begin_step before the step in progress has ended");
  effects_.clear();
  for (const std::size_t rank : order_) {
    if (!ranks_[rank]->idle()) add(ranks_[rank]->begin_step(now_ns));
  }
  const RankLoad load = rank_load();
  end_ns_ = now_ns;
  for (const std::size_t rank : order_) {
    if (!ranks_[rank]->in_step()) continue;
    end_ns_ = std::max(end_ns_, now_ns + ranks_[rank]->retime_step(load));
  }
  return return_effects();
}

RankLoad RankGroup::rank_load() const {
  std::uint64_t sum = 0;
  std::uint64_t largest = 0;
  for (const auto& rank : ranks_) {
    const std::uint64_t idle = 1 + rank->config().speculation.tokens;
    const std::uint64_t tokens = rank->in_step() ? rank->open_load().tokens : 0;
    sum += std::max(tokens, idle);
    largest = std::max(largest, tokens);
  }
  if (largest > ranks_.front()->timing_.model->largest_graph()) return {sum, 0};
  return {largest * ranks_.size(), largest};
}

const Effects& RankGroup::end_step(std::int64_t now_ns) {
  if (!in_step()) throw Error(ErrorKind::WrongState, "end_step without a step in progress");
  effects_.clear();
  for (const std::size_t rank : order_) {
    if (ranks_[rank]->in_step()) add(ranks_[rank]->end_step(now_ns));
  }
  return return_effects();
}

EngineSnapshot RankGroup::snapshot() const {
  EngineSnapshot sum;
  for (const auto& rank : ranks_) {
    const EngineSnapshot one = rank->snapshot();
    sum.running += one.running;
    sum.waiting += one.waiting;
    sum.loading += one.loading;
    sum.free_blocks += one.free_blocks;
    sum.cached_blocks += one.cached_blocks;
    sum.active_blocks += one.active_blocks;
    sum.held_blocks += one.held_blocks;
    sum.evictions += one.evictions;
    sum.stored_blocks += one.stored_blocks;
    if (precedence(one.phase) > precedence(sum.phase)) sum.phase = one.phase;
    sum.wake_ns = std::min(sum.wake_ns, one.wake_ns);
  }
  if (in_step()) sum.wake_ns = end_ns_;
  return sum;
}

const Effects& RankGroup::transfers_landed(std::int64_t now_ns) {
  effects_.clear();
  for (const auto& rank : ranks_) add(rank->transfers_landed(now_ns));
  return return_effects();
}

void RankGroup::finish_transfers() {
  for (const auto& rank : ranks_) rank->finish_transfers();
}

Stall RankGroup::stall() const {
  const auto stuck = std::ranges::find_if(ranks_, [](const auto& rank) { return rank->stuck_.has_value(); });
  return (stuck == ranks_.end() ? ranks_.front() : *stuck)->stall();
}

void RankGroup::check() {
  for (const auto& rank : ranks_) rank->check();
}

}  // namespace understudy
