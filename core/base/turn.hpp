// One caller at a time: a second thread, or a user's policy that calls back, is told instead of crashing.
#pragma once

#include <atomic>

#include "base/errors.hpp"

namespace understudy {

// Of an object that belongs to whoever is in the middle of a call.
class Turns {
 public:
  bool taken() const noexcept { return taken_; }

 private:
  friend class Turn;
  std::atomic<bool> taken_ = false;
};

// Takes the turn, or throws WrongState: `what` is in the middle of a call.
class Turn {
 public:
  Turn(Turns& turns, const char* what) : turns_(turns) {
    if (turns_.taken_.exchange(true)) {
      throw Error(ErrorKind::WrongState, what,
                  " is in the middle of a call from another thread or policy: one at a time");
    }
  }
  ~Turn() { turns_.taken_ = false; }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Turns& turns_;
};

}  // namespace understudy
