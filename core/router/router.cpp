#include "router/router.hpp"

#include <algorithm>
#include <random>
#include <unordered_map>

namespace understudy {

namespace {

class RoundRobin final : public Router {
 public:
  WorkerId choose(const RouteRequest&, FleetView& view) override { return view.ready()[next_++ % view.ready().size()]; }
  bool blind() const noexcept override { return true; }

 private:
  std::size_t next_ = 0;
};

class Random final : public Router {
 public:
  explicit Random(std::uint64_t seed) : random_(seed) {}
  WorkerId choose(const RouteRequest&, FleetView& view) override {
    return view.ready()[static_cast<std::size_t>(random_() % view.ready().size())];
  }
  bool blind() const noexcept override { return true; }

 private:
  std::mt19937_64 random_;
};

class LeastLoaded final : public Router {
 public:
  WorkerId choose(const RouteRequest&, FleetView& view) override {
    const std::span<const WorkerLoad> loads = view.loads();
    return *std::ranges::min_element(view.ready(), {}, [loads](WorkerId id) { return loads[id].outstanding_tokens; });
  }
};

// The less loaded of two random workers.
class PowerOfTwo final : public Router {
 public:
  explicit PowerOfTwo(std::uint64_t seed) : random_(seed) {}
  WorkerId choose(const RouteRequest&, FleetView& view) override {
    const std::span<const WorkerId> ready = view.ready();
    const auto first = static_cast<std::size_t>(random_() % ready.size());
    if (ready.size() == 1) return ready[first];
    const std::size_t second = (first + 1 + static_cast<std::size_t>(random_() % (ready.size() - 1))) % ready.size();
    const WorkerId one = ready[first];
    const WorkerId other = ready[second];
    return view.loads()[other].outstanding_tokens < view.loads()[one].outstanding_tokens ? other : one;
  }

 private:
  std::mt19937_64 random_;
};

// A session stays on the worker that was least loaded when it began, as long as that one is ready.
class SessionAffinity final : public Router {
 public:
  void begin() override { worker_of_.clear(); }
  WorkerId choose(const RouteRequest& request, FleetView& view) override {
    const auto [at, fresh] = worker_of_.try_emplace(request.session, 0);
    if (fresh || !std::ranges::binary_search(view.ready(), at->second)) at->second = least_.choose(request, view);
    return at->second;
  }

 private:
  LeastLoaded least_;
  std::unordered_map<std::uint64_t, WorkerId> worker_of_;
};

// The same, but a session that another one starts goes to the worker of that one.
class SessionTree final : public Router {
 public:
  void begin() override { worker_of_.clear(); }
  WorkerId choose(const RouteRequest& request, FleetView& view) override {
    const auto [at, fresh] = worker_of_.try_emplace(request.session, kLater);
    if (fresh && request.parent_session != RouteRequest::kNoSession) {
      const auto parent = worker_of_.find(request.parent_session);
      if (parent != worker_of_.end()) at->second = parent->second;
    }
    if (!std::ranges::binary_search(view.ready(), at->second)) at->second = least_.choose(request, view);
    return at->second;
  }

 private:
  LeastLoaded least_;
  std::unordered_map<std::uint64_t, WorkerId> worker_of_;
};

}  // namespace

std::shared_ptr<Router> make_router(const std::string& name, std::uint64_t seed) {
  if (name == "round_robin") return std::make_shared<RoundRobin>();
  if (name == "random") return std::make_shared<Random>(seed);
  if (name == "least_loaded") return std::make_shared<LeastLoaded>();
  if (name == "power_of_two") return std::make_shared<PowerOfTwo>(seed);
  if (name == "session_affinity") return std::make_shared<SessionAffinity>();
  if (name == "session_tree") return std::make_shared<SessionTree>();
  return nullptr;
}

}  // namespace understudy
