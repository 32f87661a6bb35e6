#include "router/kv_router.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/assert.hpp"
#include "base/errors.hpp"

namespace understudy {

namespace {

constexpr std::size_t kTiers = PrefixIndex::kTiers;
constexpr double kExcluded = std::numeric_limits<double>::infinity();  // cost of a worker that must not be chosen

void require(bool sound, const char* what) {
  if (!sound) throw Error(ErrorKind::ConfigError, what);
}

bool is_weight(double value) { return std::isfinite(value) && value >= 0; }

// Longest prefix that any worker holds on its device.
std::uint32_t longest(const std::vector<std::uint32_t>& held) {
  std::uint32_t most = 0;
  for (std::size_t row = 0; row < held.size(); row += kTiers) most = std::max(most, held[row]);
  return most;
}

}  // namespace

KvRouter::KvRouter(KvRouterConfig config) : config_(std::move(config)), random_(config_.seed) {
  require(is_weight(config_.overlap_score_credit), "overlap_score_credit must be finite and not negative");
  require(is_weight(config_.overlap_score_credit_decay), "overlap_score_credit_decay must be finite and not negative");
  require(is_weight(config_.prefill_load_scale), "prefill_load_scale must be finite and not negative");
  require(is_weight(config_.decode_active_request_weight),
          "decode_active_request_weight must be finite and not negative");
  require(is_weight(config_.host_cache_hit_weight) && is_weight(config_.disk_cache_hit_weight) &&
              is_weight(config_.external_cache_hit_weight),
          "host_, disk_ and external_cache_hit_weight must be finite and not negative");
  require(is_weight(config_.temperature), "temperature must be finite and not negative");
  require(config_.event_delay_ns >= 0 && config_.event_period_ns >= 0 && config_.predict_ttl_ns >= 0,
          "event_delay_ms, event_period_ms and predict_ttl_ms must not be negative");
  require(config_.event_loss >= 0 && config_.event_loss < 1, "event_loss must be from 0 to below 1");
  require(config_.use_events || (config_.event_delay_ns == 0 && config_.event_period_ns == 0 &&
                                 config_.event_loss == 0 && config_.predict_ttl_ns == 0),
          "without events (use_events false) nothing delays, bundles, loses or precedes them: event_delay_ms, "
          "event_period_ms, event_loss and predict_ttl_ms must be 0");
  require(config_.approximate_ttl_ns > 0, "approximate_ttl_ms must be above 0");
  require(!config_.queue_threshold || is_weight(*config_.queue_threshold),
          "queue_threshold must be finite and not negative");
}

void KvRouter::begin() {
  random_.seed(config_.seed);
  view_ = std::make_shared<KvView>(config_);
  load_ = std::make_unique<KvLoad>();
  batch_tokens_.clear();
  ready_.clear();
  while (!queue_.empty()) queue_.pop();
  decisions_.clear();
  candidates_.clear();
}

void KvRouter::add_worker(const WorkerInfo& worker) {
  UNDERSTUDY_ASSERT(worker.id == ready_.size(), "ids of workers are assigned in order");
  view_->add_worker(worker.pool, worker.groups);
  load_->add_worker();
  batch_tokens_.push_back(worker.batch_tokens);
  ready_.push_back(true);
}

void KvRouter::set_state(WorkerId worker, WorkerState state) {
  ready_.at(worker) = state == WorkerState::Ready;
  if (state == WorkerState::Gone) forget(worker);
}

void KvRouter::forget(std::size_t worker) { view_->forget(worker); }

void KvRouter::set_degraded(std::size_t worker, bool degraded) { view_->set_degraded(worker, degraded); }

bool KvRouter::reads_residency() const noexcept {
  return config_.use_events && config_.punctual() && (config_.predict_ttl_ns == 0 || !config_.keep_decisions);
}

bool KvRouter::observes() const noexcept { return config_.use_events || config_.keep_decisions; }

bool KvRouter::gather(std::size_t worker, const TimedEvents& events) {
  view_->observe(worker, events);
  return true;
}

bool KvRouter::gather_shared(std::uint32_t pool, const TimedEvents& events) {
  view_->observe_shared(pool, events);
  return true;
}

void KvRouter::check(std::size_t worker, const Residency& store) { view_->check(worker, store); }

void KvRouter::first_token(std::uint64_t row) { load_->first_token(row); }

void KvRouter::ended(std::uint64_t row) {
  if (queue_.empty() || !queue_.forget(row)) load_->ended(row);
}

std::size_t KvRouter::choose(const RouteRequest& request, FleetView& view) {
  require_ready();
  std::span<const BlockIdentity> blocks;
  if (request.identities != nullptr) {
    blocks = request.identities->first(request.prompt_tokens / request.block_size, identities_);
  }
  std::vector<std::uint64_t> prompt(blocks.size());
  std::ranges::transform(blocks, prompt.begin(), &BlockIdentity::sequence_hash);
  if (reads_residency() && view.held(blocks, held_)) {
    view_->add_assumed(prompt, view.now_ns(), held_);
  } else {
    view_->match(prompt, view.now_ns(), held_);
  }
  return admit_or_queue(request, std::move(prompt), view.now_ns());
}

std::size_t KvRouter::choose(const RouteRequest& request, std::vector<std::uint64_t> prompt, std::int64_t now_ns) {
  require_ready();
  view_->match(prompt, now_ns, held_);
  return admit_or_queue(request, std::move(prompt), now_ns);
}

void KvRouter::require_ready() const {
  if (std::ranges::find(ready_, true) == ready_.end()) {
    throw Error(ErrorKind::WrongState, "no worker is available");
  }
}

std::size_t KvRouter::admit_or_queue(const RouteRequest& request, std::vector<std::uint64_t> prompt,
                                     std::int64_t now_ns) {
  if (queue_.on() && (!queue_.empty() || all_busy())) {
    const std::uint64_t cached = std::uint64_t{longest(held_)} * request.block_size;
    RouteRequest kept = request;
    kept.identities = nullptr;  // invalid after this call
    queue_.push({kept, std::move(prompt), held_, now_ns}, cached);
    return kLater;
  }
  return admit(request, std::move(prompt), now_ns, now_ns);
}

std::optional<Released> KvRouter::release(std::int64_t now_ns) {
  if (queue_.empty() || all_busy()) return std::nullopt;
  KvQueue::Waiting next = queue_.pop();
  held_ = std::move(next.held);
  held_.resize(ready_.size() * kTiers, 0);  // workers added meanwhile hold nothing
  return Released{next.request.row, admit(next.request, std::move(next.prompt), next.since_ns, now_ns)};
}

bool KvRouter::all_busy() const {
  for (std::size_t worker = 0; worker < ready_.size(); ++worker) {
    if (ready_[worker] && !queue_.busy(load_->prefill_tokens()[worker], batch_tokens_[worker])) return false;
  }
  return true;
}

std::size_t KvRouter::admit(const RouteRequest& request, std::vector<std::uint64_t> prompt, std::int64_t since_ns,
                            std::int64_t now_ns) {
  const std::size_t workers = load_->requests().size();
  load_->shared(prompt, active_);
  compute_costs(request, request.prompt_tokens / request.block_size, held_, costs_,
                config_.keep_candidates ? &terms_ : nullptr);
  KvDecision decision;
  std::size_t worker = config_.temperature > 0 ? sample_by_cost() : pick_cheapest(decision.ties);
  UNDERSTUDY_ASSERT(worker < workers && ready_[worker], "chooses a worker that is not available");
  if (!config_.imposed.empty()) {
    if (request.row >= config_.imposed.size() || config_.imposed[request.row] < 0 ||
        static_cast<std::size_t>(config_.imposed[request.row]) >= workers) {
      throw Error(ErrorKind::InvalidArgument, "imposed: names no worker of this fleet for row ", request.row);
    }
    worker = static_cast<std::size_t>(config_.imposed[request.row]);
  }
  decision.row = request.row;
  decision.time_ns = now_ns;
  decision.waited_ns = now_ns - since_ns;
  decision.worker = static_cast<std::int32_t>(worker);
  record(decision, request, prompt);
  const std::uint64_t cached = std::uint64_t{held_[worker * kTiers]} * request.block_size;
  view_->sent(worker, prompt, now_ns);
  load_->add_request(request.row, worker,
                     request.prompt_tokens - std::min<std::uint64_t>(cached, request.prompt_tokens), prompt);
  return worker;
}

// Cost in blocks: queued prompt tokens, uncached blocks of this prompt, and active blocks on the worker.
void KvRouter::compute_costs(const RouteRequest& request, std::size_t blocks, const std::vector<std::uint32_t>& held,
                             std::vector<double>& costs, std::vector<KvTerms>* terms) const {
  const std::span<const std::uint64_t> prefill = load_->prefill_tokens();
  const auto size = static_cast<double>(request.block_size);
  std::uint64_t least = ~std::uint64_t{0};
  for (std::size_t worker = 0; worker < prefill.size(); ++worker) {
    if (ready_[worker]) least = std::min(least, prefill[worker]);
  }
  const double request_blocks = std::ceil(static_cast<double>(request.prompt_tokens) / size);
  costs.resize(prefill.size());
  if (terms != nullptr) terms->resize(prefill.size());
  for (std::size_t worker = 0; worker < prefill.size(); ++worker) {
    if (!ready_[worker]) {
      costs[worker] = kExcluded;
      continue;
    }
    const std::uint32_t* const tiers = &held[worker * kTiers];
    const double cached = tiers[0] * size;
    const double raw =
        (static_cast<double>(prefill[worker]) + std::max(0.0, request.prompt_tokens - cached) + cached) / size;
    const double above = static_cast<double>(prefill[worker] - least) / size;
    const double decay = 1.0 / (1.0 + config_.overlap_score_credit_decay * above / request_blocks);
    const double credit = config_.overlap_score_credit * decay * tiers[0] + config_.host_cache_hit_weight * tiers[1] +
                          config_.disk_cache_hit_weight * tiers[2] + config_.external_cache_hit_weight * tiers[3];
    const KvTerms found{
        .prefill = config_.prefill_load_scale * std::max(0.0, raw - credit),
        .active = static_cast<double>(load_->blocks(worker)),
        .added = static_cast<double>(blocks - active_[worker]),
        .requests = config_.decode_active_request_weight * static_cast<double>(load_->requests()[worker]),
        .credit = config_.prefill_load_scale * credit};
    costs[worker] = found.cost();
    if (terms != nullptr) (*terms)[worker] = found;
  }
}

std::size_t KvRouter::pick_cheapest(std::uint32_t& ties) {
  std::size_t best = 0;
  ties = 1;
  for (std::size_t worker = 1; worker < costs_.size(); ++worker) {
    if (costs_[worker] < costs_[best]) {
      best = worker;
      ties = 1;
    } else if (costs_[worker] == costs_[best] && random_() % ++ties == 0) {
      best = worker;
    }
  }
  return best;
}

// Samples a worker; its weight falls by e for each `temperature` * (cost range) above the least cost.
std::size_t KvRouter::sample_by_cost() {
  const double least = *std::ranges::min_element(costs_);
  double most = least;
  for (const double cost : costs_) most = cost == kExcluded ? most : std::max(most, cost);
  const double range = most - least;
  double sum = 0;
  std::vector<double> upto(costs_.size());
  for (std::size_t worker = 0; worker < costs_.size(); ++worker) {
    if (costs_[worker] != kExcluded) {
      sum += range > 0 ? std::exp(-(costs_[worker] - least) / (range * config_.temperature)) : 1.0;
    }
    upto[worker] = sum;
  }
  const double drawn = static_cast<double>(random_() >> 11) * 0x1.0p-53 * sum;
  const auto at = std::ranges::lower_bound(upto, drawn);
  return static_cast<std::size_t>(std::min(at, upto.end() - 1) - upto.begin());
}

void KvRouter::record(KvDecision decision, const RouteRequest& request, const std::vector<std::uint64_t>& prompt) {
  const auto worker = static_cast<std::size_t>(decision.worker);
  decision.cost = costs_[worker];
  decision.overlap = held_[worker * kTiers];
  for (std::size_t tier = 1; tier < kTiers; ++tier) decision.lower_overlap += held_[worker * kTiers + tier];
  decision.best_overlap = longest(held_);
  last_ = decision;
  if (!config_.keep_decisions) return;
  const bool differs = view_->match_truth(prompt, truly_held_);
  const std::vector<std::uint32_t>& truth = differs ? truly_held_ : held_;
  decision.true_overlap = truth[worker * kTiers];
  decision.best_true_overlap = longest(truth);
  if (differs) compute_costs(request, request.prompt_tokens / request.block_size, truth, true_costs_);
  const std::vector<double>& costs = differs ? true_costs_ : costs_;
  decision.cost_regret = costs[worker] - *std::ranges::min_element(costs);
  for (std::size_t other = 0; config_.keep_candidates && other < ready_.size(); ++other) {
    if (!ready_[other]) continue;
    KvCandidate candidate{
        .worker = other, .terms = terms_[other], .overlap = held_[other * kTiers], .lower_overlap = 0};
    for (std::size_t tier = 1; tier < kTiers; ++tier) candidate.lower_overlap += held_[other * kTiers + tier];
    candidates_.push_back(candidate);
  }
  decision.end_of_candidates = candidates_.size();
  decisions_.push_back(decision);
}

}  // namespace understudy
