#include "router/router.hpp"

#include <algorithm>
#include <random>
#include <unordered_map>

namespace understudy {

namespace {

class RoundRobin final : public Router {
 public:
  std::size_t choose(const RouteRequest&, FleetView& view) override { return next_++ % view.loads().size(); }
  bool blind() const noexcept override { return true; }

 private:
  std::size_t next_ = 0;
};

class Random final : public Router {
 public:
  explicit Random(std::uint64_t seed) : random_(seed) {}
  std::size_t choose(const RouteRequest&, FleetView& view) override {
    return static_cast<std::size_t>(random_() % view.loads().size());
  }
  bool blind() const noexcept override { return true; }

 private:
  std::mt19937_64 random_;
};

class LeastLoaded final : public Router {
 public:
  std::size_t choose(const RouteRequest&, FleetView& view) override {
    const std::span<const WorkerLoad> loads = view.loads();
    const auto least = std::ranges::min_element(loads, {}, &WorkerLoad::outstanding_tokens);
    return static_cast<std::size_t>(least - loads.begin());
  }
};

// The less loaded of two random workers.
class PowerOfTwo final : public Router {
 public:
  explicit PowerOfTwo(std::uint64_t seed) : random_(seed) {}
  std::size_t choose(const RouteRequest&, FleetView& view) override {
    const std::span<const WorkerLoad> loads = view.loads();
    const auto one = static_cast<std::size_t>(random_() % loads.size());
    if (loads.size() == 1) return one;
    const std::size_t other = (one + 1 + static_cast<std::size_t>(random_() % (loads.size() - 1))) % loads.size();
    return loads[other].outstanding_tokens < loads[one].outstanding_tokens ? other : one;
  }

 private:
  std::mt19937_64 random_;
};

// A session stays on the worker that was least loaded when it began.
class SessionAffinity final : public Router {
 public:
  void begin(std::span<const std::uint64_t>) override { worker_of_.clear(); }
  std::size_t choose(const RouteRequest& request, FleetView& view) override {
    const auto [at, fresh] = worker_of_.try_emplace(request.session, 0);
    if (fresh) at->second = least_.choose(request, view);
    return at->second;
  }

 private:
  LeastLoaded least_;
  std::unordered_map<std::uint64_t, std::size_t> worker_of_;
};

}  // namespace

std::shared_ptr<Router> make_router(const std::string& name, std::uint64_t seed) {
  if (name == "round_robin") return std::make_shared<RoundRobin>();
  if (name == "random") return std::make_shared<Random>(seed);
  if (name == "least_loaded") return std::make_shared<LeastLoaded>();
  if (name == "power_of_two") return std::make_shared<PowerOfTwo>(seed);
  if (name == "session_affinity") return std::make_shared<SessionAffinity>();
  return nullptr;
}

}  // namespace understudy
