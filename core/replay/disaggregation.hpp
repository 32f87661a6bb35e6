// Prefill and decode pools of one run: how requests are divided between them.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/handoff_net.hpp"
#include "router/router.hpp"

namespace understudy {

// Decides whether the prompt of a request is computed by a prefill worker.
class Decider {
 public:
  virtual ~Decider() = default;
  // `cached_tokens`: of the prompt, on the decode worker that was chosen.
  virtual bool remote(const RouteRequest& request, std::uint32_t cached_tokens) = 0;
  // Whether it reads them; the decode worker is then chosen first.
  virtual bool reads_cache() const noexcept { return true; }
};

// Limits of tokens that the decode worker lacks. The default sends every prompt to a prefill worker.
class UncachedRule final : public Decider {
 public:
  std::uint32_t prompt_tokens = 0;    // shorter prompts stay
  std::uint32_t uncached_tokens = 0;  // at least these, and
  double uncached_share = 0;          // at least this share of the prompt
  bool either = false;                // or

  bool remote(const RouteRequest& request, std::uint32_t cached_tokens) override {
    if (request.prompt_tokens < prompt_tokens) return false;
    const std::uint32_t uncached = request.prompt_tokens - std::min(cached_tokens, request.prompt_tokens);
    const bool enough = uncached >= uncached_tokens;
    const bool share = static_cast<double>(uncached) >= uncached_share * static_cast<double>(request.prompt_tokens);
    return either ? enough || share : enough && share;
  }
  bool reads_cache() const noexcept override { return uncached_tokens > 0 || uncached_share > 0; }
};

struct Disaggregation {
  std::shared_ptr<Router> decode_router;
  std::shared_ptr<Decider> decider;
  bool decode_first = false;  // the decode worker is chosen when the request arrives; else when its prompt is computed
  std::int64_t hop_ns = 0;    // from the end of a prompt to the arrival at the decode worker
  HandOffLinks links;
  double transfer_failure_rate = 0;  // probability of each read to fail when it ends
  std::uint64_t seed = 0;            // of these failures
};

// How a request went.
enum class RequestWay : std::uint8_t {
  Whole,     // no pools with roles
  Local,     // the decode worker computed its prompt, by the rule
  Remote,    // a prefill worker did
  Fallback,  // a prefill worker did, the read failed, and the decode worker computed the prompt again
  Failed,    // the read failed, and the request ended
};

}  // namespace understudy
