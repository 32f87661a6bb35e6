// The transfers of a run: when one ends, whoever started it is told, in order of time.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <unordered_map>

#include "link.hpp"

namespace understudy {

class TransferOwner {
 public:
  virtual ~TransferOwner() = default;
  // The transfer's last byte arrived at `time_ns`. May start others at that time.
  virtual void landed(TransferId id, std::int64_t time_ns) = 0;
};

class TransferHub {
 public:
  Links& links() noexcept { return links_; }
  const Links& links() const noexcept { return links_; }

  TransferId start(std::int64_t now_ns, std::span<const LinkId> path, std::uint64_t bytes, Priority priority,
                   TransferOwner& owner) {
    const TransferId id = links_.start(now_ns, path, bytes, priority);
    owners_.emplace(id, &owner);
    next_wake_ns_ = links_.next_wake_ns();
    return id;
  }

  // Everything that ends up to and including `now_ns`, each at its own time. Ends at the same time come in the order
  // of their starts; what they start and ends at once follows. When an owner throws, the others that end at that time
  // are told before the first such exception leaves.
  void run_until(std::int64_t now_ns) {
    while (next_wake_ns_ && *next_wake_ns_ <= now_ns) {
      const std::vector<Completion> ends = links_.pop_due(*next_wake_ns_);
      next_wake_ns_ = links_.next_wake_ns();
      std::exception_ptr failure;
      for (const Completion& end : ends) {
        const auto owner = owners_.find(end.id);
        TransferOwner& told = *owner->second;
        owners_.erase(owner);
        try {
          told.landed(end.id, end.time_ns);
        } catch (...) {
          if (!failure) failure = std::current_exception();
        }
      }
      if (failure) std::rethrow_exception(failure);
    }
  }

  // Not after the next end; nothing when nothing is under way.
  const std::optional<std::int64_t>& next_wake_ns() const noexcept { return next_wake_ns_; }

 private:
  Links links_;
  std::optional<std::int64_t> next_wake_ns_;
  std::unordered_map<TransferId, TransferOwner*> owners_;
};

}  // namespace understudy
