// Which worker holds which blocks, on which tier: what a router knows, built from KV events alone.
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
#include "router/ageing.hpp"
#include "router/block_table.hpp"
#include "router/holder_sets.hpp"

namespace understudy {

// A worker of the fleet, and its data-parallel rank.
struct WorkerRank {
  std::uint64_t worker = 0;
  std::uint32_t rank = 0;
  auto operator<=>(const WorkerRank&) const = default;
};

// How far into a prompt each worker holds its blocks: a row a member, a column a tier. A block counts once, on the
// fastest tier that holds it, and only while every block before it is held too.
struct Matches {
  std::vector<WorkerRank> members;
  std::vector<std::uint32_t> blocks;  // members x tiers
};

// What became of a batch of events.
struct Applied {
  std::uint64_t stored = 0;            // (block, worker, tier) that were new
  std::uint64_t removed = 0;           // and that went
  std::uint64_t repeated = 0;          // stored again although there
  std::vector<std::uint64_t> unknown;  // removed although not there; the rest of the batch counts all the same
};

// Members are numbered as they come, and a number is used again when its worker is gone. Any number of threads may
// read while one writes: a call that changes the index holds it for itself, long batches piece by piece.
class PrefixIndex {
 public:
  static constexpr std::uint32_t kTiers = HolderSets::kTiers;
  using Member = std::uint32_t;

  // With `counts_copies` a block goes with its last copy, as in the raw stream of an engine that announces every one;
  // without, the first removal is the last, and a repeated event changes nothing.
  explicit PrefixIndex(Ageing::Limits limits = {}, bool counts_copies = false)
      : ageing_(limits), counts_copies_(counts_copies) {}

  // ── Events ──
  Member join(WorkerRank who);
  std::optional<Member> member(WorkerRank who) const;
  void store(Member member, Tier tier, std::span<const std::uint64_t> hashes, std::int64_t now_ns, Applied& out);
  void remove(Member member, Tier tier, std::span<const std::uint64_t> hashes, Applied& out);
  // Events in order: kinds 0 stored, 1 removed, 2 cleared (of a tier, or of all: 0), each of the blocks between two
  // offsets. InvalidArgument, before anything changes, when columns contradict each other.
  struct Columns {
    std::span<const std::uint8_t> kinds;
    std::span<const std::uint8_t> tiers;
    std::span<const std::int64_t> offsets;
    std::span<const std::uint64_t> hashes;
  };
  void apply(Member member, const Columns& events, std::int64_t now_ns, Applied& out);
  // With `sole_only`, rows of the consolidated stream alone.
  void apply(Member member, std::span<const EventRecord> rows, bool sole_only, std::int64_t now_ns, Applied& out);
  // Everything that it holds, on one tier or on all; it stays a member.
  void clear(Member member, std::optional<Tier> tier);
  // Nothing of it stays anywhere.
  void leave(WorkerRank who);
  // Lets go what is older or more than the limits allow; returns how much.
  std::uint64_t expire(std::int64_t now_ns);

  // ── Questions ──
  // `hashes` are the sequence hashes of a prompt's blocks, in order. With `early_exit` it ends where at most one worker
  // is left, whose count is then a lower bound.
  Matches find(std::span<const std::uint64_t> hashes, bool early_exit) const;
  // The same as a row for every member by its number, for who asks often.
  void match(std::span<const std::uint64_t> hashes, bool early_exit, std::vector<std::uint32_t>& blocks) const;
  bool holds(Member member, Tier tier, std::uint64_t hash) const;
  std::uint64_t blocks(Member member, Tier tier) const;
  std::size_t num_blocks() const;  // distinct hashes
  std::vector<WorkerRank> members() const;
  std::size_t bytes() const;

  // ── As a whole ──
  struct Row {
    WorkerRank who;
    std::uint8_t tier;
    std::uint64_t hash;
    auto operator<=>(const Row&) const = default;
  };
  // What everybody holds, in order.
  std::vector<Row> dump() const;
  std::vector<std::uint8_t> snapshot() const;
  // Becomes what the snapshot was. InvalidArgument when it is damaged; then nothing has changed.
  void restore(std::span<const std::uint8_t> bytes, std::int64_t now_ns);
  // InvariantViolated when counts and table contradict each other. O(blocks).
  void check() const;

 private:
  static constexpr std::uint8_t kCleared = 2;     // beside EventKind
  static constexpr std::size_t kAhead = 32;       // blocks whose lines are on their way
  static constexpr std::size_t kPiece = 1 << 12;  // rows for which readers wait at most
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
  void store_one(std::uint64_t hash, BlockTable::Bucket* warmed, Holder holder, std::int64_t now_ns, Applied& out);
  void remove_one(std::uint64_t hash, BlockTable::Bucket* warmed, Holder holder, Applied& out);
  bool drop(BlockTable::Entry entry, Holder holder);
  void forget_copies(std::uint64_t hash, Holder holder);
  void clear_locked(Member member, std::optional<Tier> tier);
  std::uint64_t expire_locked(std::int64_t now_ns);
  std::uint64_t& count(Holder holder) { return counts_[HolderSets::member_of(holder)][HolderSets::tier_of(holder)]; }
  static std::uint32_t column(Tier tier);
  static void require_sound(const Columns& events);

  mutable std::shared_mutex mutex_;
  BlockTable table_;
  HolderSets sets_;
  Ageing ageing_;
  bool counts_copies_;
  std::unordered_map<Copy, std::uint32_t, CopyHash> copies_;  // beyond the first
  std::vector<std::optional<WorkerRank>> members_;
  std::map<WorkerRank, Member> numbers_;
  std::vector<std::array<std::uint64_t, kTiers>> counts_;
};

}  // namespace understudy
