// Reading a pool's eviction policy from Python.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <memory>

#include "eviction/policy.hpp"

namespace understudy {

// A policy by name, or an object with on_freed, on_taken and select. ConfigError when it is neither.
PolicyConfig read_policy(nanobind::handle policy, nanobind::handle thresholds);

// A policy by name, or a callable that makes one for each pool that it is to serve.
std::function<PolicyConfig()> read_policy_maker(nanobind::handle policy);

// An object whose last reference may go on a thread without the GIL.
std::shared_ptr<nanobind::object> keep(nanobind::handle object);

// For the garbage collector, since a policy may refer to the manager that it serves: return, or release, the object
// behind an advisor from read_policy. A released advisor raises PolicyError from then on.
nanobind::handle policy_object(const PolicyAdvisor& advisor) noexcept;
void forget_policy(PolicyAdvisor& advisor) noexcept;

}  // namespace understudy
