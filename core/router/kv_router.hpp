// The KV-aware router: chooses the worker with the least work for a request, given its cache and load.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "router/kv_config.hpp"
#include "router/kv_load.hpp"
#include "router/kv_queue.hpp"
#include "router/kv_view.hpp"
#include "router/router.hpp"

namespace understudy {

// Why a request was sent to its worker.
struct KvDecision {
  std::uint64_t row = 0;
  std::int64_t time_ns = 0;
  std::int32_t worker = 0;
  double cost = 0;                  // of that worker, in blocks
  std::uint32_t overlap = 0;        // leading blocks it was believed to hold on the device
  std::uint32_t lower_overlap = 0;  // blocks after those, on slower tiers
  std::uint32_t best_overlap = 0;   // longest overlap that any worker was believed to have
  std::uint32_t true_overlap = 0;   // actual overlap on the device; next: the longest of any worker
  std::uint32_t best_true_overlap = 0;
  double cost_regret = 0;      // extra cost of the choice, by actual overlaps
  std::uint32_t ties = 1;      // workers with that cost
  std::int64_t waited_ns = 0;  // in the router
  std::size_t end_of_candidates = 0;
};

// Terms of a worker's cost, in blocks; the cost is their sum, in this order.
struct KvTerms {
  double prefill = 0;   // queued prompt tokens and this request's own, less the credit
  double active = 0;    // distinct prompt blocks of its live requests
  double added = 0;     // blocks of this prompt that these do not have
  double requests = 0;  // its live requests, weighted
  double credit = 0;    // what cached blocks took off the first term, if that stayed above 0

  double cost() const noexcept { return prefill + active + added + requests; }
};

// A worker that could have been chosen.
struct KvCandidate {
  std::size_t worker = 0;
  KvTerms terms;
  std::uint32_t overlap = 0;  // as in KvDecision
  std::uint32_t lower_overlap = 0;
};

// Uses the cost function of Dynamo 1.6.1: see docs/routing.md. Ties are broken uniformly, by seed.
class KvRouter final : public Router {
 public:
  explicit KvRouter(KvRouterConfig config);

  void begin() override;
  void add_worker(const WorkerInfo& worker) override;
  // choose throws WrongState when no worker is ready.
  void set_state(WorkerId worker, WorkerState state) override;
  std::size_t num_workers() const noexcept { return ready_.size(); }
  // Forgets the worker's cache.
  void forget(std::size_t worker);
  bool forget_blocks(WorkerId worker) override {
    forget(worker);
    return true;
  }
  void set_degraded(std::size_t worker, bool degraded);  // KvView::set_degraded

  std::size_t choose(const RouteRequest& request, FleetView& view) override;
  // Same, given the sequence hashes of the prompt's full blocks.
  std::size_t choose(const RouteRequest& request, std::vector<std::uint64_t> prompt, std::int64_t now_ns);
  bool queues() const noexcept override { return config_.queue_threshold.has_value(); }
  std::optional<Released> release(std::int64_t now_ns) override;
  bool reads_residency() const noexcept override;
  bool observes() const noexcept override;
  bool gather(std::size_t worker, const TimedEvents& events) override;
  bool gather_shared(std::uint32_t pool, const TimedEvents& events) override;
  bool has_index() const noexcept override { return true; }
  void check(std::size_t worker, const Residency& store) override;
  bool tracks() const noexcept override { return true; }
  void first_token(std::uint64_t row) override;
  void ended(std::uint64_t row) override;

  const KvRouterConfig& config() const noexcept { return config_; }
  const std::vector<KvDecision>& decisions() const noexcept { return decisions_; }
  // Candidates of all decisions, if they are kept; those of a decision end at its end_of_candidates.
  const std::vector<KvCandidate>& candidates() const noexcept { return candidates_; }
  const KvDecision& last() const noexcept { return last_; }
  const std::vector<double>& costs() const noexcept { return costs_; }  // of the last decision, by worker
  std::size_t waiting() const noexcept { return queue_.size(); }
  // Null before the first run.
  const KvView* view() const noexcept { return view_.get(); }
  const std::shared_ptr<KvView>& shared_view() noexcept { return view_; }
  const KvLoad* load() const noexcept { return load_.get(); }

 private:
  void require_ready() const;
  bool all_busy() const;
  std::size_t admit_or_queue(const RouteRequest& request, std::vector<std::uint64_t> prompt, std::int64_t now_ns);
  std::size_t admit(const RouteRequest& request, std::vector<std::uint64_t> prompt, std::int64_t since_ns,
                    std::int64_t now_ns);
  void compute_costs(const RouteRequest& request, std::size_t blocks, const std::vector<std::uint32_t>& held,
                     std::vector<double>& costs, std::vector<KvTerms>* terms = nullptr) const;
  std::size_t pick_cheapest(std::uint32_t& ties);
  std::size_t sample_by_cost();
  void record(KvDecision decision, const RouteRequest& request, const std::vector<std::uint64_t>& prompt);

  KvRouterConfig config_;
  std::mt19937_64 random_;
  std::shared_ptr<KvView> view_;
  std::unique_ptr<KvLoad> load_;
  std::vector<KvDecision> decisions_;
  std::vector<KvCandidate> candidates_;
  KvDecision last_;
  KvQueue queue_{config_};
  std::vector<std::uint64_t> batch_tokens_;  // by worker, as is the next
  std::vector<bool> ready_;
  std::vector<BlockIdentity> identities_;  // scratch, as are the following
  std::vector<std::uint32_t> held_;
  std::vector<std::uint32_t> active_;
  std::vector<double> costs_;
  std::vector<KvTerms> terms_;
  std::vector<std::uint32_t> truly_held_;
  std::vector<double> true_costs_;
};

}  // namespace understudy
