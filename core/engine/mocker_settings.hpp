// Settings that imitate Dynamo's mocker and its replay where they differ from the engine.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/timing.hpp"

namespace understudy {

struct MockerSettings {
  Speedups speedups;
  bool charge_first_token = true;    // StepTiming::charges_first_token
  std::vector<double> accept_rates;  // rates of the draft tokens of a speculative burst; empty: no speculation
  std::uint64_t burst_seed = 42;
  bool route_rejected = false;  // route requests that fit no worker before they are rejected

  // A copy of the timing model with these settings. ConfigError: the model times whole steps, not decoding apart.
  StepTiming apply_to(StepTiming timing) const {
    if (!timing.model->times_decoding_apart() && speedups.decode != 1) {
      throw Error(ErrorKind::ConfigError, "decode_speedup_ratio=", speedups.decode,
                  " needs a timing model that times decoding apart; this one times whole steps: use speedup_ratio");
    }
    if (!timing.model->times_decoding_apart() && !charge_first_token) {
      throw Error(ErrorKind::ConfigError,
                  "charge_first_token needs a timing model that times decoding separately; this one times whole "
                  "steps: leave it out");
    }
    timing.speedups = speedups;
    timing.charges_first_token = charge_first_token;
    return timing;
  }
};

}  // namespace understudy
