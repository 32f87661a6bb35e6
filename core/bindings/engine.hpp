// Making engines from Python.
#pragma once

#include <memory>
#include <string>

#include "engine/config.hpp"
#include "live_net.hpp"
#include "live_run.hpp"

namespace understudy {

// With `tiers`, and `run` where several engines share them; with `net`, as its worker `worker`.
std::shared_ptr<Engine> make_engine(const EngineConfig& config, const StepTiming& timing, const TierConfig* tiers,
                                    LiveRun* run, const std::string& name, LiveNet* net = nullptr,
                                    std::uint32_t worker = 0);

}  // namespace understudy
