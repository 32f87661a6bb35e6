// Typed errors of the core. Each kind has a Python class of the same name in understudy.errors.
#pragma once

#include <exception>
#include <string>

#include "base/text.hpp"

namespace understudy {

enum class ErrorKind {
  ConfigError,        // a setting that cannot be applied
  InvalidArgument,    // a value, length or id that the call does not accept
  WrongState,         // the object is not in the state that the call requires
  UnknownBlock,       // a block id outside the pool
  CapacityExhausted,  // fewer blocks available than asked for
  PolicyError,        // an eviction policy broke its contract
  InvariantViolated,  // a check() or an assertion found inconsistent state
};

// Thrown by the core; the bindings turn it into the Python class named after `kind`.
class Error : public std::exception {
 public:
  template <typename... Parts>
  explicit Error(ErrorKind kind, const Parts&... parts) : kind_(kind), message_(text_of(parts...)) {}

  ErrorKind kind() const noexcept { return kind_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  ErrorKind kind_;
  std::string message_;
};

}  // namespace understudy
