// Reports a failed check of the core.
#pragma once

#include "base/errors.hpp"

namespace understudy {

[[noreturn]] inline void fail(const char* what) { throw Error(ErrorKind::InvariantViolated, "soak: ", what); }

}  // namespace understudy
