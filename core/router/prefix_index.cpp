#include "router/prefix_index.hpp"

#include <algorithm>
#include <array>
#include <mutex>

#include "base/assert.hpp"
#include "base/errors.hpp"

namespace understudy {

std::uint32_t PrefixIndex::column(Tier tier) {
  const auto index = static_cast<std::uint32_t>(tier) - 1;
  if (index >= kTiers) {
    throw Error(ErrorKind::InvalidArgument, "tier must be 1 to 4, got ", static_cast<unsigned>(tier));
  }
  return index;
}

// ── Members ──

PrefixIndex::Member PrefixIndex::join(WorkerRank id) {
  const std::lock_guard lock(mutex_);
  const auto [at, fresh] = numbers_.try_emplace(id, 0);
  if (!fresh) return at->second;
  const bool full = numbers_.size() > members_.size();  // including the new one: no number is free
  const auto vacant = full ? members_.end() : std::ranges::find_if(members_, [](const auto& each) { return !each; });
  const auto number = static_cast<Member>(vacant - members_.begin());
  if (number >= HolderSets::kMaxMembers) {
    numbers_.erase(at);
    throw Error(ErrorKind::CapacityExhausted, "an index has at most ", HolderSets::kMaxMembers, " workers");
  }
  if (vacant == members_.end()) {
    members_.emplace_back();
    counts_.emplace_back();
  }
  members_[number] = id;
  counts_[number] = {};
  return at->second = number;
}

std::optional<PrefixIndex::Member> PrefixIndex::member(WorkerRank id) const {
  const std::shared_lock lock(mutex_);
  const auto at = numbers_.find(id);
  return at == numbers_.end() ? std::nullopt : std::optional(at->second);
}

void PrefixIndex::leave(WorkerRank id) {
  const std::lock_guard lock(mutex_);
  const auto at = numbers_.find(id);
  if (at == numbers_.end()) return;
  clear_locked(at->second, std::nullopt);
  decay_.forget_member(at->second);
  members_[at->second].reset();
  numbers_.erase(at);
  while (!members_.empty() && !members_.back()) {
    members_.pop_back();
    counts_.pop_back();
  }
}

void PrefixIndex::clear(Member member, std::optional<Tier> tier) {
  const std::lock_guard lock(mutex_);
  clear_locked(member, tier);
}

void PrefixIndex::clear_locked(Member member, std::optional<Tier> tier) {
  const std::uint32_t first = tier ? column(*tier) : 0;
  const std::uint32_t last = tier ? first : kTiers - 1;
  std::uint64_t held = 0;
  for (std::uint32_t at = first; at <= last; ++at) held += counts_[member][at];
  if (held == 0) return;
  table_.sweep([&](HolderTable::Entry entry) {
    for (std::uint32_t at = first; at <= last; ++at) {
      const Holder holder = HolderSets::holder(member, at);
      const SetId to = sets_.drop(entry.set(), holder);
      if (to == entry.set()) continue;
      forget_copies(entry.hash(), holder);
      if (decay_.limits().any()) decay_.forget(entry.hash(), holder);
      if (to == 0) return false;
      entry.set(to);
    }
    return true;
  });
  for (std::uint32_t at = first; at <= last; ++at) counts_[member][at] = 0;
  table_.shrink();
}

// ── Events ──

void PrefixIndex::store_one(std::uint64_t hash, HolderTable::Bucket* warmed, Holder holder, std::int64_t now_ns,
                            Applied& out) {
  const HolderTable::Entry entry = table_.find_or_make(hash, warmed);
  const SetId to = sets_.add(entry.set(), holder);
  if (decay_.limits().any()) decay_.touch(hash, holder, now_ns);
  if (to == entry.set()) {
    ++out.repeated;
    if (counts_copies_) ++copies_[{hash, holder}];
    return;
  }
  entry.set(to);
  ++count(holder);
  ++out.stored;
}

inline void PrefixIndex::remove_one(std::uint64_t hash, HolderTable::Bucket* warmed, Holder holder, Applied& out) {
  if (!copies_.empty()) {
    if (const auto copy = copies_.find({hash, holder}); copy != copies_.end()) {
      if (--copy->second == 0) copies_.erase(copy);
      return;
    }
  }
  const HolderTable::Entry entry = table_.find(hash, warmed);
  if (!entry || !drop(entry, holder)) {
    out.unknown.push_back(hash);
    return;
  }
  if (decay_.limits().any()) decay_.forget(hash, holder);
  ++out.removed;
}

inline bool PrefixIndex::drop(HolderTable::Entry entry, Holder holder) {
  const SetId to = sets_.drop(entry.set(), holder);
  if (to == entry.set()) return false;
  UNDERSTUDY_ASSERT(count(holder) > 0, "a worker loses more blocks than it holds");
  --count(holder);
  if (to == 0) {
    table_.erase(entry);
  } else {
    entry.set(to);
  }
  return true;
}

// Locks the index for one piece at a time and prefetches a row's line some rows ahead. Calls each(row, its hash, that
// line).
template <typename Hash, typename Each>
void PrefixIndex::in_pieces(std::size_t rows, std::int64_t now_ns, Hash hash, Each each) {
  struct Coming {
    std::uint64_t hash;
    HolderTable::Bucket* warmed;
  };
  std::array<Coming, kAhead> coming{};
  for (std::size_t begin = 0; begin < rows; begin += kPiece) {
    const std::size_t end = std::min(rows, begin + kPiece);
    const std::lock_guard lock(mutex_);
    std::uint64_t moves = table_.moves();
    for (std::size_t i = begin; i < std::min(end, begin + kAhead); ++i) {
      coming[i % kAhead] = {hash(i), table_.warm(hash(i))};
    }
    for (std::size_t i = begin; i < end; ++i) {
      if (moves != table_.moves()) {
        moves = table_.moves();
        for (Coming& one : coming) one.warmed = table_.warm(one.hash);
      }
      const Coming now = coming[i % kAhead];
      if (i + kAhead < end) {
        const std::uint64_t next = hash(i + kAhead);
        coming[i % kAhead] = {next, table_.warm(next)};
      }
      each(i, now.hash, now.warmed);
    }
    if (decay_.limits().any()) (void)expire_locked(now_ns);
    table_.shrink();
  }
}

void PrefixIndex::store(Member member, Tier tier, std::span<const std::uint64_t> hashes, std::int64_t now_ns,
                        Applied& out) {
  const Holder holder = HolderSets::holder(member, column(tier));
  in_pieces(
      hashes.size(), now_ns, [&](std::size_t i) { return hashes[i]; },
      [&](std::size_t, std::uint64_t hash, HolderTable::Bucket* warmed) {
        store_one(hash, warmed, holder, now_ns, out);
      });
}

void PrefixIndex::remove(Member member, Tier tier, std::span<const std::uint64_t> hashes, Applied& out) {
  const Holder holder = HolderSets::holder(member, column(tier));
  in_pieces(
      hashes.size(), 0, [&](std::size_t i) { return hashes[i]; },
      [&](std::size_t, std::uint64_t hash, HolderTable::Bucket* warmed) { remove_one(hash, warmed, holder, out); });
}

void PrefixIndex::require_sound(const Columns& events) {
  const std::size_t count = events.kinds.size();
  if (events.tiers.size() != count || events.offsets.size() != count + 1 || events.offsets[0] != 0 ||
      events.offsets[count] != static_cast<std::int64_t>(events.hashes.size())) {
    throw Error(ErrorKind::InvalidArgument, "events need a kind and a tier each, and offsets from 0 to the ",
                events.hashes.size(), " hashes");
  }
  for (std::size_t i = 0; i < count; ++i) {
    const bool cleared = events.kinds[i] == kCleared;
    if (events.kinds[i] > kCleared) {
      throw Error(ErrorKind::InvalidArgument, "event ", i, ": kinds are 0 (stored), 1 (removed) and 2 (cleared), got ",
                  static_cast<unsigned>(events.kinds[i]));
    }
    if (!cleared || events.tiers[i] != 0) (void)column(static_cast<Tier>(events.tiers[i]));
    if (events.offsets[i + 1] < events.offsets[i] || (cleared && events.offsets[i + 1] != events.offsets[i])) {
      throw Error(ErrorKind::InvalidArgument, "event ", i,
                  ": offsets must not fall, and a cleared event has no blocks");
    }
  }
}

void PrefixIndex::apply(Member member, const Columns& events, std::int64_t now_ns, Applied& out) {
  require_sound(events);
  for (std::size_t i = 0; i < events.kinds.size(); ++i) {
    const auto tier = static_cast<Tier>(events.tiers[i]);
    const auto begin = static_cast<std::size_t>(events.offsets[i]);
    const auto blocks = events.hashes.subspan(begin, static_cast<std::size_t>(events.offsets[i + 1]) - begin);
    if (events.kinds[i] == kCleared) {
      clear(member, events.tiers[i] == 0 ? std::nullopt : std::optional(tier));
    } else if (events.kinds[i] == static_cast<std::uint8_t>(EventKind::Stored)) {
      store(member, tier, blocks, now_ns, out);
    } else {
      remove(member, tier, blocks, out);
    }
  }
}

void PrefixIndex::apply(Member member, std::span<const EventRecord> rows, bool sole_only, std::int64_t now_ns,
                        Applied& out) {
  in_pieces(
      rows.size(), now_ns, [&](std::size_t i) { return rows[i].key(); },
      [&](std::size_t i, std::uint64_t hash, HolderTable::Bucket* warmed) {
        const EventRecord& row = rows[i];
        if (sole_only && !row.sole) return;
        const Holder holder = HolderSets::holder(member, column(row.tier));
        if (row.kind == EventKind::Stored) {
          store_one(hash, warmed, holder, now_ns, out);
        } else if (row.kind == EventKind::Removed) {
          remove_one(hash, warmed, holder, out);
        }
      });
}

void PrefixIndex::forget_copies(std::uint64_t hash, Holder holder) {
  if (!copies_.empty()) copies_.erase({hash, holder});
}

std::uint64_t PrefixIndex::expire(std::int64_t now_ns) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t gone = expire_locked(now_ns);
  table_.shrink();
  return gone;
}

std::uint64_t PrefixIndex::expire_locked(std::int64_t now_ns) {
  std::uint64_t gone = 0;
  while (const auto due = decay_.take_due(now_ns)) {
    const HolderTable::Entry entry = table_.find(due->hash);
    forget_copies(due->hash, due->holder);
    const bool dropped = entry && drop(entry, due->holder);
    UNDERSTUDY_ASSERT(dropped, "an expired block is not in the index");
    ++gone;
  }
  return gone;
}

}  // namespace understudy
