// A router's knowledge of its workers' caches: from events that come late or not at all, from what it sent, or both.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "router/kv_config.hpp"
#include "router/prefix_index.hpp"
#include "router/router.hpp"

namespace understudy {

class KvView {
 public:
  KvView(const KvRouterConfig& config, std::size_t workers);
  void add_worker();
  // The pool of each worker, whose shared tiers it reaches. Unless told, all are of pool 0.
  void set_pools(std::span<const std::uint32_t> pool_of) { pool_of_.assign(pool_of.begin(), pool_of.end()); }

  // ── What it is told ──
  // Events of a worker, in the order of time. What the configuration delays or loses is not known before, or ever.
  void observe(std::size_t worker, const TimedEvents& events);
  // And of a tier that every worker of a pool reaches: its blocks count where they continue what a worker has of its
  // own.
  void observe_shared(std::uint32_t pool, const TimedEvents& events);
  // A prompt was sent to a worker.
  void sent(std::size_t worker, std::span<const std::uint64_t> prompt, std::int64_t now_ns);
  void forget(std::size_t worker);  // all that was known of it
  // While what events say of a worker is not the whole truth, what was sent there counts as cached, for the time that
  // it does without events.
  void set_degraded(std::size_t worker, bool degraded);

  // ── What it knows ──
  // Leading blocks of a prompt that each worker holds, by tier: as a router believes it at this time.
  void match(std::span<const std::uint64_t> prompt, std::int64_t now_ns, std::vector<std::uint32_t>& out);
  // The same for who knows what workers hold without being told: what counts beside that.
  void believe(std::span<const std::uint64_t> prompt, std::int64_t now_ns, std::vector<std::uint32_t>& out);
  // And as it is, where that is not the same. False: it is.
  bool match_truth(std::span<const std::uint64_t> prompt, std::vector<std::uint32_t>& out) const;

  // InvariantViolated when a view that nothing delays or loses is not what the worker's store holds. The number of
  // blocks every time, each of them now and then.
  void check(std::size_t worker, const Residency& store);

  PrefixIndex& index() noexcept { return index_; }
  std::uint64_t lost() const noexcept { return lost_; }
  std::uint64_t unknown_removals() const noexcept { return unknown_removals_; }

 private:
  static constexpr std::uint64_t kWholeEvery = 256;
  struct Late {
    std::int64_t due_ns;
    std::vector<EventRecord> rows;
  };

  void apply(PrefixIndex& index, std::size_t worker, std::span<const EventRecord> rows);
  void observe_late(std::deque<Late>& late, std::uint64_t publisher, const TimedEvents& events);
  void add_shared(std::uint32_t pool, std::span<const std::uint64_t> prompt, std::vector<std::uint32_t>& out) const;
  std::uint32_t pool_of(std::size_t worker) const noexcept { return worker < pool_of_.size() ? pool_of_[worker] : 0; }
  void catch_up(std::int64_t now_ns);
  void take_larger(PrefixIndex& other, std::span<const std::uint64_t> prompt, std::int64_t now_ns,
                   std::vector<std::uint32_t>& out);

  const KvRouterConfig& config_;
  PrefixIndex index_;
  std::unique_ptr<PrefixIndex> predicted_;  // null: what was sent does not count
  std::unique_ptr<PrefixIndex> truth_;      // null: the index is the truth
  std::unique_ptr<PrefixIndex> assumed_;    // of workers that are or were degraded; null: nobody was
  std::vector<bool> degraded_;              // by worker
  struct Shared {
    std::unique_ptr<PrefixIndex> index;  // of its tiers, as one worker; null: nobody has told of any
    std::deque<Late> late;
  };
  std::vector<Shared> shared_;          // by pool, as far as somebody has told
  std::vector<std::uint32_t> pool_of_;  // by worker; those behind it are of pool 0
  std::vector<std::deque<Late>> late_;  // by worker, in the order in which they come
  std::vector<std::uint32_t> scratch_;
  std::uint64_t checks_ = 0;
  std::uint64_t lost_ = 0;
  std::uint64_t unknown_removals_ = 0;
};

}  // namespace understudy
