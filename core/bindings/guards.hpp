// Guards: Python objects that own references to blocks until they are released.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "named.hpp"
#include "store/block_store.hpp"
#include "tokens/identities.hpp"

namespace understudy {

namespace nb = nanobind;

// A pool of a store, named a block manager in Python.
struct Manager {
  std::shared_ptr<BlockStore> store;
  std::size_t pool = 0;
};

// Runs `work` without the GIL when it is long, and always when the pool's policy is Python's: the store must never
// wait for the GIL, nor a thread that holds the GIL for the policy.
template <typename Work>
auto without_gil(const Manager& manager, std::size_t blocks, Work work) {
  constexpr std::size_t kLongCallBlocks = 32;
  std::optional<nb::gil_scoped_release> release;
  if (blocks >= kLongCallBlocks || manager.store->advised(manager.pool)) release.emplace();
  return work();
}

// Counts the leak and warns; for finalizers, with the GIL held.
void report_leak(const Manager& manager, std::size_t blocks, const char* remedy);

// Raises InvalidArgument when the identities are known to be of blocks of another size than the manager's.
void require_block_size(const Manager& manager, const Identities& identities);

// Of any type: `read_identities` raises InvalidArgument for another one.
using IdentitiesArg = PyArg<"Identities">;

// The identities that Python passed. InvalidArgument for an object of another type, with the remedy.
const Identities& read_identities(nb::handle given);

// Owns one reference to each of `ids`. Moving out (take) leaves it empty, under the GIL, so that two threads with
// one guard cannot both release it.
class Guard {
 public:
  Guard(Manager manager, std::vector<SlotId> ids) : manager_(std::move(manager)), ids_(std::move(ids)) {}
  Guard(Guard&& other) noexcept : manager_(std::move(other.manager_)), ids_(std::exchange(other.ids_, {})) {
    released_ = std::exchange(other.released_, true);
  }
  Guard& operator=(Guard&&) = delete;
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
  ~Guard();  // the safety net: gives the blocks back and warns of the leak

  const Manager& manager() const noexcept { return manager_; }
  const std::vector<SlotId>& ids() const noexcept { return ids_; }
  std::size_t size() const noexcept { return ids_.size(); }
  bool released() const noexcept { return released_; }

  // Idempotent, legal in every state.
  void release(bool tail_first = false);
  // The ids, which the caller now owns. WrongState when the guard was released or consumed.
  std::vector<SlotId> consume();
  // Pass the ids to `work`, which may run without the GIL, and restore them if it fails; a concurrent release() is then
  // carried out.
  template <typename Work>
  std::vector<SlotId> transfer(Work work) {
    std::vector<SlotId> ids = consume();
    const std::vector<SlotId> before = ids;
    const Manager manager = manager_;
    in_transfer_ = true;
    try {
      without_gil(manager, ids.size(), [&] { work(manager, ids); });
    } catch (...) {
      in_transfer_ = false;
      ids_ = before;
      released_ = false;
      if (std::exchange(release_requested_, false)) release(true);
      throw;
    }
    in_transfer_ = false;
    manager_.store.reset();
    return ids;
  }
  // Run `work` on the ids, without the GIL if it is long, and keep their references until it ends: a concurrent
  // release() is carried out then.
  template <typename Work>
  void lend(Work work) {
    require_live();
    const std::vector<SlotId> ids = ids_;
    const Manager manager = manager_;
    const Lent lent(*this);
    without_gil(manager, ids.size(), [&] { work(manager, ids); });
  }
  // Move the first `count` ids to the caller; the others stay.
  std::vector<SlotId> split(std::size_t count);
  void require_live() const;

 private:
  struct Lent {
    explicit Lent(Guard& owner) : guard(owner) { ++guard.lent_; }
    ~Lent() {
      if (--guard.lent_ == 0 && !guard.left_.empty()) guard.give_back(std::exchange(guard.left_, {}));
    }
    Lent(const Lent&) = delete;
    Lent& operator=(const Lent&) = delete;
    Guard& guard;
  };
  void give_back(const std::vector<SlotId>& ids);

  Manager manager_;
  std::vector<SlotId> ids_;
  bool released_ = false;
  std::size_t lent_ = 0;      // calls that work on the ids
  std::vector<SlotId> left_;  // released while they were lent
  bool tail_first_ = false;   // how
  bool in_transfer_ = false;
  bool release_requested_ = false;  // while the ids were out
};

class MutableBlocks : public Guard {
 public:
  MutableBlocks(Manager manager, std::vector<SlotId> ids, Identities evicted = {},
                std::vector<Token> evicted_tokens = {})
      : Guard(std::move(manager), std::move(ids)),
        evicted_(std::move(evicted)),
        evicted_tokens_(std::move(evicted_tokens)) {}
  const Identities& evicted() const noexcept { return evicted_; }
  const std::vector<Token>& evicted_tokens() const noexcept { return evicted_tokens_; }

 private:
  Identities evicted_;
  std::vector<Token> evicted_tokens_;
};

class StagedBlocks : public Guard {
 public:
  StagedBlocks(Manager manager, std::vector<SlotId> ids, Identities identities)
      : Guard(std::move(manager), std::move(ids)), identities_(std::move(identities)) {}
  const Identities& identities() const noexcept { return identities_; }

 private:
  Identities identities_;
};

class RegisteredBlocks : public Guard {
 public:
  RegisteredBlocks(Manager manager, std::vector<SlotId> ids, Identities identities)
      : Guard(std::move(manager), std::move(ids)), identities_(std::move(identities)) {}
  Identities identities() const { return identities_; }
  void drop_identities(std::size_t count) { identities_ = identities_.slice(count, identities_.size()); }

 private:
  Identities identities_;
};

// Remembers blocks without holding them.
struct WeakBlocks {
  Manager manager;
  std::vector<SlotId> ids;
  Identities identities;
};

}  // namespace understudy
