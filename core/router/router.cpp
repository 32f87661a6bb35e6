#include "router/router.hpp"

#include <algorithm>
#include <random>

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

}  // namespace

std::shared_ptr<Router> make_router(const std::string& name, std::uint64_t seed) {
  if (name == "round_robin") return std::make_shared<RoundRobin>();
  if (name == "random") return std::make_shared<Random>(seed);
  if (name == "least_loaded") return std::make_shared<LeastLoaded>();
  return nullptr;
}

}  // namespace understudy
