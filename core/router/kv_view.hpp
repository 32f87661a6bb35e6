// A router's knowledge of its workers' caches: from events (perhaps late or lost), from sent prompts, or both.
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
  explicit KvView(const KvRouterConfig& config);
  // `pool`: whose shared tiers it reaches; `groups`: of its cache, null for one of full attention.
  void add_worker(std::uint32_t pool, std::shared_ptr<const GroupLayout> groups = nullptr);

  // ── Input ──
  // Events of a worker, in order of time; applied late or never, as configured.
  void observe(std::size_t worker, const TimedEvents& events);
  // Events of a tier shared by a pool: its blocks count where they continue those of a worker.
  void observe_shared(std::uint32_t pool, const TimedEvents& events);
  // A prompt was sent to a worker.
  void sent(std::size_t worker, std::span<const std::uint64_t> prompt, std::int64_t now_ns);
  void forget(std::size_t worker);  // drops all knowledge of the worker
  // While events of a worker are incomplete, prompts sent to it count as cached, for approximate_ttl_ns.
  void set_degraded(std::size_t worker, bool degraded);

  // ── Output ──
  // Leading blocks of a prompt that each worker is believed to hold now, by tier.
  void match(std::span<const std::uint64_t> prompt, std::int64_t now_ns, std::vector<std::uint32_t>& out);
  // Adds what is assumed beyond the workers' events: sent prompts and shared tiers.
  void add_assumed(std::span<const std::uint64_t> prompt, std::int64_t now_ns, std::vector<std::uint32_t>& out);
  // Actual overlaps, if tracked separately. False: `match` is exact.
  bool match_truth(std::span<const std::uint64_t> prompt, std::vector<std::uint32_t>& out) const;

  // Throws InvariantViolated when an undelayed view differs from the worker's store: counts every time, all blocks
  // every kWholeEvery calls.
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
  // Leading blocks of a prompt that each worker holds by this index, in all of its cache groups or the first.
  void match_index(const PrefixIndex& index, std::span<const std::uint64_t> prompt, bool all_groups,
                   std::vector<std::uint32_t>& out) const;
  void observe_late(std::deque<Late>& late, std::uint64_t publisher, const TimedEvents& events);
  void add_shared(std::uint32_t pool, std::span<const std::uint64_t> prompt, std::vector<std::uint32_t>& out) const;
  void apply_due_events(std::int64_t now_ns);
  void take_larger(PrefixIndex& other, std::span<const std::uint64_t> prompt, std::int64_t now_ns,
                   std::vector<std::uint32_t>& out);

  const KvRouterConfig& config_;
  PrefixIndex index_;
  std::unique_ptr<PrefixIndex> predicted_;  // null: sent prompts do not count
  std::unique_ptr<PrefixIndex> truth_;      // null: the index is exact
  std::unique_ptr<PrefixIndex> assumed_;    // of workers that are or were degraded; null: none
  std::vector<bool> degraded_;              // by worker
  struct Shared {
    std::unique_ptr<PrefixIndex> index;  // of its tiers, as one worker; null: no events yet
    std::deque<Late> late;
  };
  std::vector<Shared> shared_;                              // by pool, up to the last with events
  std::vector<std::uint32_t> pool_of_;                      // by worker
  std::vector<std::shared_ptr<const GroupLayout>> groups_;  // by worker; empty: all have one group
  std::vector<std::deque<Late>> late_;                      // by worker, in order of delivery
  std::vector<std::uint32_t> scratch_;
  std::uint64_t checks_ = 0;
  std::uint64_t lost_ = 0;
  std::uint64_t unknown_removals_ = 0;
};

}  // namespace understudy
