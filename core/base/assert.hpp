// Invariants at state transitions: checked in builds with UNDERSTUDY_ASSERTIONS, free in release builds.
//
// A failure throws InvariantViolated with the file, line and condition, so that Python tests name what failed. In a
// noexcept function or a destructor the same message ends the process. O(n) checks belong in check() instead.
#pragma once

#include "base/errors.hpp"

#ifdef UNDERSTUDY_ASSERTIONS

namespace understudy {

[[noreturn, gnu::cold, gnu::noinline]] inline void throw_assertion(const char* file, int line, const char* condition,
                                                                   const char* message) {
  throw Error(ErrorKind::InvariantViolated, file, ":", line, ": ", message, "; not true: ", condition);
}

}  // namespace understudy

#define UNDERSTUDY_ASSERT(condition, message) \
  ((condition) ? static_cast<void>(0) : ::understudy::throw_assertion(__FILE__, __LINE__, #condition, message))

#else

// Unevaluated: costs nothing, and its variables still count as used.
#define UNDERSTUDY_ASSERT(condition, message) static_cast<void>(sizeof((condition) ? 1 : 0))

#endif
