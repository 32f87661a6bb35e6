// Two routers as one: the first chooses prefill workers, the second decode workers.
#pragma once

#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "router/router.hpp"

namespace understudy {

// A row is in its prefill stage from the choice of a prefill worker until that worker has ended it.
class StagedRouter final : public Router {
 public:
  StagedRouter(std::shared_ptr<Router> prefill, std::shared_ptr<Router> decode)
      : prefill_(std::move(prefill)), decode_(std::move(decode)) {
    if (prefill_ == decode_) {
      throw Error(ErrorKind::ConfigError, "decode_routing must be a router of its own, not the one of prefill workers");
    }
    for (const auto& router : {prefill_, decode_}) {
      if (router->queues()) {
        throw Error(ErrorKind::ConfigError,
                    "routing: a router in which requests wait does not work with prefill and decode pools yet; leave "
                    "its queue out");
      }
    }
  }

  void begin() override {
    in_prefill_.clear();
    roles_.clear();
    prefill_->begin();
    decode_->begin();
  }
  void add_worker(const WorkerInfo& worker) override {
    roles_.push_back(worker.role);
    prefill_->add_worker(worker);
    decode_->add_worker(worker);
  }
  // A worker of the other stage is never ready.
  void set_state(WorkerId worker, WorkerState state) override {
    const auto tell = [&](Router& router, RequestStage stage) {
      router.set_state(worker, serves(roles_[worker], stage) ? state : WorkerState::Gone);
    };
    tell(*prefill_, RequestStage::Prefill);
    tell(*decode_, RequestStage::Decode);
  }
  WorkerId choose(const RouteRequest& request, FleetView& view) override {
    if (request.stage != RequestStage::Prefill) return decode_->choose(request, view);
    in_prefill_.insert(request.row);
    return prefill_->choose(request, view);
  }
  bool reads_residency() const noexcept override {
    const auto can = [](const Router& router) { return router.reads_residency() || !router.observes(); };
    return observes() && can(*prefill_) && can(*decode_);
  }
  bool observes() const noexcept override { return prefill_->observes() || decode_->observes(); }
  std::int64_t event_delay_ns() const noexcept override {
    return std::max(prefill_->event_delay_ns(), decode_->event_delay_ns());
  }
  void observe(const KvDelivery& delivery) override {
    if (prefill_->observes()) prefill_->observe(delivery);
    if (decode_->observes()) decode_->observe(delivery);
  }
  bool gather(WorkerId worker, const TimedEvents& events) override {
    return gathers([&](Router& router) { return router.gather(worker, events); });
  }
  bool gather_shared(std::uint32_t pool, const TimedEvents& events) override {
    return gathers([&](Router& router) { return router.gather_shared(pool, events); });
  }
  bool tracks() const noexcept override { return prefill_->tracks() || decode_->tracks(); }
  void first_token(std::uint64_t row) override { of(row).first_token(row); }
  void ended(std::uint64_t row) override {
    Router& router = of(row);
    in_prefill_.erase(row);
    router.ended(row);
  }
  // Of requests that are in both stages at a time.
  void first_token(std::uint64_t row, RequestStage stage) { in(stage).first_token(row); }
  void ended(std::uint64_t row, RequestStage stage) { in(stage).ended(row); }
  bool asks_workers() const noexcept override { return prefill_->asks_workers() || decode_->asks_workers(); }

 private:
  Router& in(RequestStage stage) { return stage == RequestStage::Prefill ? *prefill_ : *decode_; }
  Router& of(std::uint64_t row) { return in_prefill_.contains(row) ? *prefill_ : *decode_; }
  // Both subscribe in the same way, or only one does.
  template <typename Call>
  bool gathers(Call call) {
    const bool first = prefill_->observes() && call(*prefill_);
    const bool second = decode_->observes() && call(*decode_);
    if (prefill_->observes() && decode_->observes() && first != second) {
      throw Error(ErrorKind::ConfigError,
                  "decode_routing: two KV routers of one fleet must both delay events themselves, or neither");
    }
    return first || second;
  }

  std::shared_ptr<Router> prefill_;
  std::shared_ptr<Router> decode_;
  std::vector<WorkerRole> roles_;  // by worker
  std::unordered_set<std::uint64_t> in_prefill_;
};

}  // namespace understudy
