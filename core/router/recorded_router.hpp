// Records the choices of another router, with the blocks that each candidate had cached at that time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "router/kv_view.hpp"
#include "router/router.hpp"

namespace understudy {

struct RecordedChoice {
  std::uint64_t row = 0;
  std::int64_t time_ns = 0;
  std::size_t worker = 0;
  std::uint32_t overlap = 0;          // leading prompt blocks that the chosen worker had on its device
  std::uint32_t best_overlap = 0;     // longest overlap of any candidate
  std::size_t end_of_candidates = 0;  // in candidates(), if they are kept
};

// A worker that could have been chosen.
struct RecordedCandidate {
  std::size_t worker = 0;
  WorkerLoad load;
  std::uint32_t overlap = 0;
};

// Passes every call on to `inner`, whose choices and run are unchanged. ConfigError for a router with an index or a
// queue, which records its decisions itself.
class RecordedRouter final : public Router {
 public:
  RecordedRouter(std::shared_ptr<Router> inner, bool keep_candidates);

  void begin() override;
  void add_worker(const WorkerInfo& worker) override;
  bool forget_blocks(WorkerId worker) override { return inner_->forget_blocks(worker); }
  void set_state(WorkerId worker, WorkerState state) override {
    if (state == WorkerState::Gone) caches_->forget(worker);
    inner_->set_state(worker, state);
  }
  WorkerId choose(const RouteRequest& request, FleetView& view) override;
  // A router that receives events gets them in either case; then the record uses them too.
  bool reads_residency() const noexcept override { return !inner_->observes(); }
  bool observes() const noexcept override { return true; }
  std::int64_t event_delay_ns() const noexcept override { return inner_->event_delay_ns(); }
  void observe(const KvDelivery& delivery) override { inner_->observe(delivery); }
  bool gather(WorkerId worker, const TimedEvents& events) override;
  bool gather_shared(std::uint32_t pool, const TimedEvents& events) override;
  bool tracks() const noexcept override { return inner_->tracks(); }
  void first_token(std::uint64_t row) override { inner_->first_token(row); }
  void ended(std::uint64_t row) override { inner_->ended(row); }
  bool asks_workers() const noexcept override { return inner_->asks_workers(); }

  const std::vector<RecordedChoice>& choices() const noexcept { return choices_; }
  const std::vector<RecordedCandidate>& candidates() const noexcept { return candidates_; }

 private:
  std::shared_ptr<Router> inner_;
  bool keep_candidates_;
  std::optional<KvView> caches_;  // as the events say
  std::vector<RecordedChoice> choices_;
  std::vector<RecordedCandidate> candidates_;
  std::vector<BlockIdentity> identities_;  // scratch, as are the following
  std::vector<std::uint64_t> prompt_;
  std::vector<std::uint32_t> held_;
};

}  // namespace understudy
