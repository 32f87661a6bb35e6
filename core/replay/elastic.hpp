// Fleets whose workers join and leave during a run: what a scaler reads at a tick, and what it orders.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "router/worker.hpp"

namespace understudy {

// State of a worker in a run. Routers see a stopped and a crashed worker alike.
enum class LifeState : std::uint8_t { Starting, Ready, Draining, Stopped, Crashed, Restarting };

inline bool is_gone(LifeState state) noexcept { return state == LifeState::Stopped || state == LifeState::Crashed; }

// A worker entered a state.
struct LifeEvent {
  std::int64_t time_ns = 0;
  WorkerId worker = 0;
  LifeState state = LifeState::Ready;
};

// Lengths of some requests, for their sum and variance.
struct LengthSum {
  std::uint64_t count = 0;
  std::uint64_t tokens = 0;
  double squares = 0;

  void add(std::uint64_t length) noexcept {
    ++count;
    tokens += length;
    squares += static_cast<double>(length) * static_cast<double>(length);
  }
  double variance() const noexcept {
    if (count == 0) return 0;
    const double mean = static_cast<double>(tokens) / static_cast<double>(count);
    const double variance = squares / static_cast<double>(count) - mean * mean;
    return variance > 0 ? variance : 0;
  }
};

// A worker at a tick: its open step, and its queue behind that.
struct WorkerMetrics {
  WorkerId worker = 0;
  std::uint32_t pool = 0;
  LifeState state = LifeState::Ready;
  bool has_stepped = false;
  std::int64_t step_ns = 0;                  // duration of the open step by the timing model; 0: unknown or none
  LengthSum prefill;                         // tokens that the step computes of each prompt
  std::uint64_t prefill_context_tokens = 0;  // of these prompts, computed before
  LengthSum decode;                          // contexts of the requests that decode
  LengthSum queued_prefill;                  // prompts
  LengthSum queued_decode;                   // prompt and output of requests that wait after their first token
};

// Requests since the last tick: how many arrived, and sums over those that completed.
struct TrafficWindow {
  std::int64_t since_ns = 0;
  std::uint64_t arrived = 0;
  std::uint64_t completed = 0;
  std::uint64_t prompt_tokens = 0;
  std::uint64_t output_tokens = 0;
  double hit_share = 0;           // sum of the cached shares of their prompts
  std::uint64_t with_tokens = 0;  // requests with a first token
  double ttft_ns = 0;
  std::uint64_t with_gaps = 0;  // requests with two tokens or more
  double itl_ns = 0;            // sum of their mean gaps
};

struct FleetMetrics {
  std::int64_t now_ns = 0;
  std::vector<WorkerMetrics> workers;  // those that have not stopped, by id
  TrafficWindow traffic;
};

struct ScaleOrder {
  std::vector<std::optional<std::uint32_t>> targets;  // by pool: workers that do not drain; none: no change
  std::optional<std::int64_t> next_ns;                // none: no further tick
};

struct Elastic {
  std::function<ScaleOrder(const FleetMetrics&)> on_tick;
  std::optional<std::int64_t> first_tick_ns;
  std::vector<std::int64_t> start_ns;  // by pool: from the order of a worker until it is ready
};

}  // namespace understudy
