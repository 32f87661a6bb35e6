// One call at a time: a second thread, or a policy that calls back, gets an error instead of corrupting the object.
#pragma once

#include <atomic>

#include "base/errors.hpp"

namespace understudy {

// Member of an object whose calls exclude each other; set while one of them runs.
class CallFlag {
 public:
  bool in_call() const noexcept { return in_call_; }

 private:
  friend class ExclusiveCall;
  std::atomic<bool> in_call_ = false;
};

// Sets the flag for its lifetime. Throws WrongState when another call has set it; `object` names it in the message.
class ExclusiveCall {
 public:
  ExclusiveCall(CallFlag& flag, const char* object) : flag_(flag) {
    if (flag_.in_call_.exchange(true)) {
      throw Error(ErrorKind::WrongState, object,
                  " is in the middle of a call from another thread or policy: one at a time");
    }
  }
  ~ExclusiveCall() { flag_.in_call_ = false; }
  ExclusiveCall(const ExclusiveCall&) = delete;
  ExclusiveCall& operator=(const ExclusiveCall&) = delete;

 private:
  CallFlag& flag_;
};

}  // namespace understudy
