#include "router/recorded_router.hpp"

#include <algorithm>
#include <utility>

#include "base/errors.hpp"

namespace understudy {

namespace {

// Events are applied when they happen, and the router itself keeps no decisions.
const KvRouterConfig kExactEvents = [] {
  KvRouterConfig config;
  config.keep_decisions = false;
  return config;
}();

}  // namespace

RecordedRouter::RecordedRouter(std::shared_ptr<Router> inner, bool keep_candidates)
    : inner_(std::move(inner)), keep_candidates_(keep_candidates) {
  if (inner_->has_index() || inner_->queues()) {
    throw Error(ErrorKind::ConfigError, "router: a KV-aware router records its own decisions; pass it as it is");
  }
}

void RecordedRouter::begin() {
  caches_.emplace(kExactEvents);
  choices_.clear();
  candidates_.clear();
  inner_->begin();
}

void RecordedRouter::add_worker(const WorkerInfo& worker) {
  caches_->add_worker(worker.pool, worker.groups);
  inner_->add_worker(worker);
}

bool RecordedRouter::gather(WorkerId worker, const TimedEvents& events) {
  caches_->observe(worker, events);
  return !inner_->observes() || inner_->gather(worker, events);
}

bool RecordedRouter::gather_shared(std::uint32_t pool, const TimedEvents& events) {
  return !inner_->observes() || inner_->gather_shared(pool, events);
}

WorkerId RecordedRouter::choose(const RouteRequest& request, FleetView& view) {
  std::span<const BlockIdentity> blocks;
  if (request.identities != nullptr) {
    blocks = request.identities->first(request.prompt_tokens / request.block_size, identities_);
  }
  if (!view.held(blocks, held_)) {
    prompt_.resize(blocks.size());
    std::ranges::transform(blocks, prompt_.begin(), &BlockIdentity::sequence_hash);
    caches_->match(prompt_, view.now_ns(), held_);
  }
  const WorkerId chosen = inner_->choose(request, view);
  const std::span<const WorkerId> ready = view.ready();
  if (!std::ranges::binary_search(ready, chosen)) return chosen;  // the run reports it
  const auto overlap = [this](WorkerId worker) { return held_[worker * PrefixIndex::kTiers]; };
  RecordedChoice choice{
      .row = request.row, .time_ns = view.now_ns(), .worker = chosen, .overlap = overlap(chosen), .best_overlap = 0};
  for (const WorkerId worker : ready) {
    choice.best_overlap = std::max(choice.best_overlap, overlap(worker));
    if (keep_candidates_) candidates_.push_back({worker, view.loads()[worker], overlap(worker)});
  }
  choice.end_of_candidates = candidates_.size();
  choices_.push_back(choice);
  return chosen;
}

}  // namespace understudy
