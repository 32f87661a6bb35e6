// How a check of the core ends that finds something wrong.
#pragma once

#include "base/errors.hpp"

namespace understudy {

[[noreturn]] inline void fail(const char* what) { throw Error(ErrorKind::InvariantViolated, "soak: ", what); }

}  // namespace understudy
