// Making requests and engines from Python.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/config.hpp"
#include "engine/engine.hpp"
#include "live_run.hpp"

namespace understudy {

// InvalidArgument names a wrong value.
RequestSpec make_spec(RequestId id, const std::string& name, nanobind::handle prompt_tokens,
                      nanobind::handle max_tokens, const Identities* identities, std::int64_t priority,
                      double arrival_time, nanobind::handle eos_at,
                      const std::optional<std::vector<std::uint32_t>>& accepts, nanobind::handle adapter);

// With `tiers`, and `run` where several engines share them.
std::shared_ptr<Engine> make_engine(const EngineConfig& config, const StepTiming& timing, const TierConfig* tiers,
                                    LiveRun* run, const std::string& name);

}  // namespace understudy
