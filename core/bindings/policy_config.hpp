// Reading a pool's eviction policy from Python.
#pragma once

#include <nanobind/nanobind.h>

#include "eviction/policy.hpp"

namespace understudy {

// A policy by name, or an object with on_freed, on_taken and select. ConfigError when it is neither.
PolicyConfig read_policy(nanobind::handle policy, nanobind::handle thresholds);

}  // namespace understudy
