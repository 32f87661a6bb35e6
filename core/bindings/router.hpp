// Routers by name, native or written in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>

#include "router/router.hpp"

namespace understudy {

// ConfigError when it is neither a known name nor has choose(request, view).
std::shared_ptr<Router> read_router(nanobind::handle router, std::uint64_t seed);

void bind_recorded_router(nanobind::module_& m);

}  // namespace understudy
