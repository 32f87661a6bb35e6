// The transfers of a run: when one ends, whoever started it is told, in order of time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "links/link.hpp"

namespace understudy {

class TransferOwner {
 public:
  virtual ~TransferOwner() = default;
  // What a transfer is for, in the owner's own terms.
  struct Errand {
    std::uint32_t role = 0;
    std::uint32_t index = 0;
    std::uint32_t tier = 0;
  };
  // The last byte of the errand's transfer arrived at `time_ns`. May start others at that time.
  virtual void landed(const Errand& errand, std::int64_t time_ns) = 0;
};

// Once the links have refused a transfer, which its owner takes for begun, nothing is told any more: from the next
// nanosecond on, whoever asks for what has ended gets that error.
class TransferHub {
 public:
  static constexpr TransferId kRefused = TransferId{1} << 63;  // and those behind it: no transfer has such an id

  Links& links() noexcept { return links_; }
  const Links& links() const noexcept { return links_; }

  TransferId start(std::int64_t now_ns, std::span<const LinkId> path, std::uint64_t bytes, Priority priority,
                   TransferOwner& owner, const TransferOwner::Errand& errand) {
    return start_all(now_ns, path, std::span(&bytes, 1), priority, owner, std::span(&errand, 1));
  }
  // As many, one after the other; returns the id of the first. All of them or none.
  TransferId start_all(std::int64_t now_ns, std::span<const LinkId> path, std::span<const std::uint64_t> bytes,
                       Priority priority, TransferOwner& owner, std::span<const TransferOwner::Errand> errands) {
    while (next_id_ - first_id_ + errands.size() > room_) {
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
    for (const TransferOwner::Errand& errand : errands) told_of(next_id_++) = {&owner, errand};
    next_wake_ns_ = links_.next_wake_or_never_ns();
    return first;
  }

  // As of Links, once all that has ended was told.
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

  // Everything that ends up to and including `now_ns`, each at its own time. Ends at the same time come in the order
  // of their starts; what they start and ends at once follows. When an owner throws, the others that end at that time
  // are told before the first such exception leaves.
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
  // Not after the next end; nothing when nothing is under way.
  std::optional<std::int64_t> next_wake_ns() const noexcept {
    return next_wake_ns_ == LinkFlow::kNeverNs ? std::nullopt : std::optional(next_wake_ns_);
  }

 private:
  struct Told {
    TransferOwner* owner = nullptr;  // null: it was told
    TransferOwner::Errand errand;
  };

  void fail(std::int64_t now_ns, std::exception_ptr failure) noexcept {
    failure_ = std::move(failure);
    room_ = 0;
    next_wake_ns_ = now_ns + 1;  // what its owner is in the middle of comes to an end
  }
  // What is too large was put together out of blocks: by settings, not by whoever asked for it.
  static std::exception_ptr refusal(const Error& error, std::span<const std::uint64_t> bytes) {
    if (std::ranges::max(bytes) <= LinkFlow::kMaxBytes) return std::make_exception_ptr(error);
    return std::make_exception_ptr(
        Error(ErrorKind::CapacityExhausted, error.what(),
              "; blocks that are loaded or stored together are too heavy: give a smaller kv_bytes_per_token "
              "(bytes_per_block), or shorter prompts (max_model_len)"));
  }
  // What ends next.
  void run_due() {
    require_sound();
    std::vector<Completion> ends = std::move(spare_);  // an owner may come back here
    links_.pop_due(next_wake_ns_, ends);
    next_wake_ns_ = links_.next_wake_or_never_ns();
    std::exception_ptr failure;
    for (const Completion& end : ends) {
      const Told told = std::exchange(told_of(end.id), {});
      while (first_id_ < next_id_ && told_of(first_id_).owner == nullptr) ++first_id_;
      try {
        told.owner->landed(told.errand, end.time_ns);
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
    }
    spare_ = std::move(ends);
    if (failure) std::rethrow_exception(failure);
  }
  Told& told_of(TransferId id) noexcept { return told_[id & (told_.size() - 1)]; }
  void grow() {
    std::vector<Told> wider(std::max<std::size_t>(2 * told_.size(), 64));
    for (TransferId id = first_id_; id < next_id_; ++id) wider[id & (wider.size() - 1)] = told_of(id);
    told_.swap(wider);
    room_ = told_.size();
  }

  Links links_;
  std::int64_t next_wake_ns_ = LinkFlow::kNeverNs;
  std::vector<Told> told_;   // a ring, by id: from first_id_ to next_id_, as ids are given in order
  std::size_t room_ = 0;     // as many as it has places; none after a failure
  TransferId first_id_ = 0;  // that was not told
  TransferId next_id_ = 0;
  std::vector<Completion> spare_;  // memory
  std::exception_ptr failure_;
};

}  // namespace understudy
