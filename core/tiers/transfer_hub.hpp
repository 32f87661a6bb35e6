// The transfers of a run: notifies the owner of each transfer when it ends, in order of time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/assert.hpp"
#include "links/link.hpp"

namespace understudy {

class TransferOwner {
 public:
  virtual ~TransferOwner() = default;
  // Purpose of a transfer, in the owner's terms.
  struct Purpose {
    std::uint32_t role = 0;
    std::uint32_t index = 0;
    std::uint32_t tier = 0;
  };
  // The last byte arrived at `time_ns`. May start other transfers at that time.
  virtual void landed(const Purpose& purpose, std::int64_t time_ns) = 0;
};

// After the links have refused a transfer, which its owner takes for started, no end is reported any more: from the
// next nanosecond on, run_until throws the refusal.
class TransferHub {
 public:
  static constexpr TransferId kRefused = TransferId{1} << 63;  // and above: no transfer has such an id

  Links& links() noexcept { return links_; }
  const Links& links() const noexcept { return links_; }

  TransferId start(std::int64_t now_ns, std::span<const LinkId> path, std::uint64_t bytes, Priority priority,
                   TransferOwner& owner, const TransferOwner::Purpose& purpose) {
    return start_all(now_ns, path, std::span(&bytes, 1), priority, owner, std::span(&purpose, 1));
  }
  // Starts one transfer per element of `bytes`, in order, all or none; returns the id of the first.
  TransferId start_all(std::int64_t now_ns, std::span<const LinkId> path, std::span<const std::uint64_t> bytes,
                       Priority priority, TransferOwner& owner, std::span<const TransferOwner::Purpose> purposes) {
    while (next_id_ - first_id_ + purposes.size() > room_) {
      if (failure_) return kRefused;
      grow();
    }
    TransferId first = kRefused;
    try {
      first = links_.start_all(now_ns, path, bytes, priority);
    } catch (const Error& error) {
      fail(now_ns, refusal(error, bytes));
      return kRefused;
    } catch (...) {
      fail(now_ns, std::current_exception());
      return kRefused;
    }
    if (first_id_ == next_id_) first_id_ = next_id_ = first;
    UNDERSTUDY_ASSERT(next_id_ == first, "transfer ids are not consecutive");
    for (const TransferOwner::Purpose& purpose : purposes) pending(next_id_++) = {&owner, purpose};
    next_wake_ns_ = links_.next_wake_or_never_ns();
    return first;
  }

  // Sets a share as Links does, after all ends up to now were reported.
  void set_share(std::int64_t now_ns, LinkId link, double share) {
    run_until(now_ns);
    require_sound();
    links_.set_share(now_ns, link, share);
    next_wake_ns_ = links_.next_wake_or_never_ns();
  }

  void set_duplex_share(std::int64_t now_ns, DuplexId duplex, double share) {
    run_until(now_ns);
    require_sound();
    links_.set_duplex_share(now_ns, duplex, share);
    next_wake_ns_ = links_.next_wake_or_never_ns();
  }

  // Reports everything that ends up to and including `now_ns`, each at its own time, ends at the same time in order of
  // start, then what they started. When an owner throws, the others of that time are notified before the first
  // exception leaves.
  void run_until(std::int64_t now_ns) {
    while (due(now_ns)) run_due();
  }

  bool failed() const noexcept { return failure_ != nullptr; }
  void require_sound() const {
    if (failure_) std::rethrow_exception(failure_);
  }

  bool due(std::int64_t now_ns) const noexcept {
    return next_wake_ns_ <= now_ns && next_wake_ns_ != LinkFlow::kNeverNs;
  }
  // Lower bound of the next end; none when no transfer is in flight.
  std::optional<std::int64_t> next_wake_ns() const noexcept {
    return next_wake_ns_ == LinkFlow::kNeverNs ? std::nullopt : std::optional(next_wake_ns_);
  }

 private:
  struct Pending {
    TransferOwner* owner = nullptr;  // null: reported
    TransferOwner::Purpose purpose;
  };

  void fail(std::int64_t now_ns, std::exception_ptr failure) noexcept {
    failure_ = std::move(failure);
    room_ = 0;
    next_wake_ns_ = now_ns + 1;  // lets the owner's current call complete
  }
  // A transfer that is too large was composed from blocks: names the settings to change.
  static std::exception_ptr refusal(const Error& error, std::span<const std::uint64_t> bytes) {
    if (std::ranges::max(bytes) <= LinkFlow::kMaxBytes) return std::make_exception_ptr(error);
    return std::make_exception_ptr(
        Error(ErrorKind::CapacityExhausted, error.what(),
              "; blocks that are loaded or stored together are too large: give a smaller kv_bytes_per_token "
              "(bytes_per_block), or shorter prompts (max_model_len)"));
  }
  // Reports the next ends.
  void run_due() {
    require_sound();
    std::vector<Completion> ends = std::move(spare_);  // landed() may reenter
    UNDERSTUDY_ASSERT(next_wake_ns_ >= links_.now_ns(), "the clock of transfers goes backwards");
    links_.pop_due(next_wake_ns_, ends);
    next_wake_ns_ = links_.next_wake_or_never_ns();
    std::exception_ptr failure;
    for (const Completion& end : ends) {
      const Pending ended = std::exchange(pending(end.id), {});
      UNDERSTUDY_ASSERT(ended.owner != nullptr, "a transfer ends twice, or was never started");
      while (first_id_ < next_id_ && pending(first_id_).owner == nullptr) ++first_id_;
      try {
        ended.owner->landed(ended.purpose, end.time_ns);
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
    }
    spare_ = std::move(ends);
    if (failure) std::rethrow_exception(failure);
  }
  Pending& pending(TransferId id) noexcept { return pending_[id & (pending_.size() - 1)]; }
  void grow() {
    std::vector<Pending> wider(std::max<std::size_t>(2 * pending_.size(), 64));
    for (TransferId id = first_id_; id < next_id_; ++id) wider[id & (wider.size() - 1)] = pending(id);
    pending_.swap(wider);
    room_ = pending_.size();
  }

  Links links_;
  std::int64_t next_wake_ns_ = LinkFlow::kNeverNs;
  std::vector<Pending> pending_;  // ring by id, from first_id_ to next_id_: ids are consecutive
  std::size_t room_ = 0;          // places in the ring; 0 after a failure
  TransferId first_id_ = 0;       // first that was not reported
  TransferId next_id_ = 0;
  std::vector<Completion> spare_;  // reused memory
  std::exception_ptr failure_;
};

}  // namespace understudy
