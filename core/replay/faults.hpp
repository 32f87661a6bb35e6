// Faults of a run: what fails, when and for how long; and what happens to requests that lose their worker.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "router/worker.hpp"
#include "slots/slot.hpp"

namespace understudy {

enum class FaultKind : std::uint8_t {
  Crash,            // a worker dies, and is back after the duration; without one it stays away
  SlowWorker,       // its steps take `factor` times as long
  SlowLink,         // links to and from `tier` have 1 / factor of their bandwidth
  LoseEvents,       // a share `rate` of its event batches never arrives; at the end the router reads all blocks anew
  LateEvents,       // its events arrive `delay_ns` later, in order
  DuplicateEvents,  // each batch arrives twice
  EventGap,         // no event arrives; at the end all that were missed do, in order
  RouterRestart,    // the router forgets all blocks; at the end it reads all of them anew
  LoadErrors,       // a share `rate` of loads from `tier` fails
};

struct Fault {
  std::int64_t time_ns = 0;
  FaultKind kind = FaultKind::Crash;
  std::optional<std::uint64_t> worker;  // none: all that are there
  std::int64_t duration_ns = 0;         // 0: to the end of the run
  double factor = 1;
  double rate = 1;
  std::int64_t delay_ns = 0;
  Tier tier = Tier::G2;
};

inline bool disturbs_events(const Fault& fault) noexcept {
  return fault.kind == FaultKind::LoseEvents || fault.kind == FaultKind::LateEvents ||
         fault.kind == FaultKind::DuplicateEvents || fault.kind == FaultKind::EventGap ||
         fault.kind == FaultKind::RouterRestart;
}

inline bool disturbs_events(std::span<const Fault> faults) noexcept {
  return std::ranges::any_of(faults, [](const Fault& fault) { return disturbs_events(fault); });
}

// Policy for a request whose worker crashes, or has drained for too long.
enum class Survival : std::uint8_t {
  Fail,     // it ends
  Retry,    // it is sent again and starts anew
  Migrate,  // it is sent again, with the tokens so far as a part of its prompt
};

struct LostRequests {
  Survival survival = Survival::Retry;
  std::int64_t delay_ns = 0;             // from the loss until the request is routed again
  std::uint32_t most_attempts = 0;       // a request that was lost so often fails; 0: no limit
  std::optional<std::int64_t> drain_ns;  // a worker that has drained for so long hands back its requests; none: never
};

// A request lost its worker. In Python as columns.
struct RequestLoss {
  static constexpr std::int32_t kDrain = -1;

  std::int64_t time_ns = 0;
  std::uint64_t row = 0;
  WorkerId worker = 0;
  Survival outcome = Survival::Fail;
  std::int32_t fault = kDrain;  // number in the plan
  std::uint32_t tokens = 0;     // that it had
};

}  // namespace understudy
