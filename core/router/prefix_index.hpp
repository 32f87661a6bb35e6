// Which worker holds which blocks, on which tier: a router's knowledge, built from KV events alone.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <shared_mutex>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "events/event_ring.hpp"
#include "router/decay.hpp"
#include "router/holder_sets.hpp"
#include "router/holder_table.hpp"

namespace understudy {

// A worker of the fleet, and its data-parallel rank.
struct WorkerRank {
  std::uint64_t worker = 0;
  std::uint32_t rank = 0;
  auto operator<=>(const WorkerRank&) const = default;
};

// Leading blocks of a prompt that each worker holds: a row per member, a column per tier. A block counts once, on the
// fastest tier that holds it, and only while every block before it is held too.
struct Matches {
  std::vector<WorkerRank> members;
  std::vector<std::uint32_t> blocks;  // members x tiers
};

// Effect of a batch of events.
struct Applied {
  std::uint64_t stored = 0;            // (block, worker, tier) that were new
  std::uint64_t removed = 0;           // (block, worker, tier) that were removed
  std::uint64_t repeated = 0;          // stored although there
  std::vector<std::uint64_t> unknown;  // removed although absent; the other events still count
};

// Members are numbered in order of joining; numbers of departed workers are reused. Many threads may read while one
// writes: a call that changes the index locks it, long batches piece by piece.
class PrefixIndex {
 public:
  static constexpr std::uint32_t kTiers = HolderSets::kTiers;
  using Member = std::uint32_t;

  // `counts_copies`: a block is removed with its last copy, as in a raw stream; without it the first removal counts,
  // and repeated events change nothing.
  explicit PrefixIndex(Decay::Limits limits = {}, bool counts_copies = false)
      : decay_(limits), counts_copies_(counts_copies) {}

  // ── Events ──
  Member join(WorkerRank id);
  std::optional<Member> member(WorkerRank id) const;
  void store(Member member, Tier tier, std::span<const std::uint64_t> hashes, std::int64_t now_ns, Applied& out);
  void remove(Member member, Tier tier, std::span<const std::uint64_t> hashes, Applied& out);
  // Events in order: kinds 0 stored, 1 removed, 2 cleared (a tier, or all: 0), each with the blocks between two
  // offsets. Throws InvalidArgument, before any change, when columns are inconsistent.
  struct Columns {
    std::span<const std::uint8_t> kinds;
    std::span<const std::uint8_t> tiers;
    std::span<const std::int64_t> offsets;
    std::span<const std::uint64_t> hashes;
  };
  static void require_sound(const Columns& events);  // throws InvalidArgument
  void apply(Member member, const Columns& events, std::int64_t now_ns, Applied& out);
  // `sole_only`: only rows of the consolidated stream.
  void apply(Member member, std::span<const EventRecord> rows, bool sole_only, std::int64_t now_ns, Applied& out);
  // Drops everything that the member holds, on one tier or all; it stays a member.
  void clear(Member member, std::optional<Tier> tier);
  // Removes the worker and everything that it holds.
  void leave(WorkerRank id);
  // Drops entries beyond the limits; returns how many.
  std::uint64_t expire(std::int64_t now_ns);

  // ── Queries ──
  // `hashes` are the sequence hashes of a prompt's blocks, in order. `early_exit`: stops when at most one worker is
  // left, whose count is then a lower bound.
  Matches find(std::span<const std::uint64_t> hashes, bool early_exit) const;
  // Same, with a row for every member by number, into reused memory.
  void match(std::span<const std::uint64_t> hashes, bool early_exit, std::vector<std::uint32_t>& blocks) const;
  bool holds(Member member, Tier tier, std::uint64_t hash) const;
  std::uint64_t blocks(Member member, Tier tier) const;
  std::size_t num_blocks() const;  // distinct hashes
  std::vector<WorkerRank> members() const;
  std::size_t bytes() const;

  // ── Whole index ──
  struct Row {
    WorkerRank id;
    std::uint8_t tier;
    std::uint64_t hash;
    auto operator<=>(const Row&) const = default;
  };
  // Everything that is held, sorted.
  std::vector<Row> dump() const;
  std::vector<std::uint8_t> snapshot() const;
  // Replaces the content by a snapshot. Throws InvalidArgument when it is damaged; then nothing has changed.
  void restore(std::span<const std::uint8_t> bytes, std::int64_t now_ns);
  // Throws InvariantViolated when counts and table disagree. O(blocks).
  void check() const;

 private:
  static constexpr std::uint8_t kCleared = 2;     // extends EventKind
  static constexpr std::size_t kAhead = 32;       // blocks: prefetch distance
  static constexpr std::size_t kPiece = 1 << 12;  // most rows for which readers wait
  struct Copy {
    std::uint64_t hash;
    Holder holder;
    bool operator==(const Copy&) const = default;
  };
  struct CopyHash {
    std::size_t operator()(const Copy& copy) const noexcept {
      return static_cast<std::size_t>((copy.hash ^ copy.holder) * 0x9E3779B97F4A7C15u);
    }
  };
  class Walk;

  template <typename Hash, typename Each>
  void in_pieces(std::size_t rows, std::int64_t now_ns, Hash hash, Each each);
  void match_locked(std::span<const std::uint64_t> hashes, bool early_exit, std::vector<std::uint32_t>& blocks) const;
  void store_one(std::uint64_t hash, HolderTable::Bucket* warmed, Holder holder, std::int64_t now_ns, Applied& out);
  void remove_one(std::uint64_t hash, HolderTable::Bucket* warmed, Holder holder, Applied& out);
  bool drop(HolderTable::Entry entry, Holder holder);
  void forget_copies(std::uint64_t hash, Holder holder);
  void clear_locked(Member member, std::optional<Tier> tier);
  std::uint64_t expire_locked(std::int64_t now_ns);
  std::uint64_t& count(Holder holder) { return counts_[HolderSets::member_of(holder)][HolderSets::tier_of(holder)]; }
  static std::uint32_t column(Tier tier);

  mutable std::shared_mutex mutex_;
  HolderTable table_;
  HolderSets sets_;
  Decay decay_;
  bool counts_copies_;
  std::unordered_map<Copy, std::uint32_t, CopyHash> copies_;  // beyond the first
  std::vector<std::optional<WorkerRank>> members_;
  std::map<WorkerRank, Member> numbers_;
  std::vector<std::array<std::uint64_t, kTiers>> counts_;
};

}  // namespace understudy
