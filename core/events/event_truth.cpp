#include "events/event_truth.hpp"

#include <algorithm>
#include <memory>

#include "tokens/lineage_text.hpp"

namespace understudy {

void EventTruth::apply(std::span<const EventRecord> rows, std::int64_t time_ns) {
  if (time_ns < time_ns_ && !rows.empty()) {
    throw Error(ErrorKind::InvariantViolated, "event ", rows[0].id, " is published at ", time_ns, " ns, after one of ",
                time_ns_);
  }
  time_ns_ = std::max(time_ns_, time_ns);
  for (const EventRecord& row : rows) {
    if (!row.sole) continue;
    const BlockIdentity& block = row.identity;
    const auto tier = static_cast<std::size_t>(row.tier);
    std::unordered_set<std::uint64_t>& resident = resident_[tier];
    const auto fail = [&](const char* what) {
      throw Error(ErrorKind::InvariantViolated, "event ", row.id, " ", what, ": block ", lineage_text(block.lineage));
    };
    if (row.kind == EventKind::Removed) {
      if (resident.erase(block.sequence_hash()) == 0) fail("removes what is not there");
    } else {
      const bool orphan = block.parent_hash != 0 && !resident.contains(block.parent_hash);
      if (orphan && row.tier == Tier::G1) fail("stores a child before its parent");
      if (!resident.insert(block.sequence_hash()).second) fail("stores what is there already");
    }
    touched_[tier].push_back(block);
  }
}

void EventTruth::require_equal(const Residency& store, Scope scope) {
  std::size_t published = 0;
  for (std::size_t pool = 0; pool < store.num_pools(); ++pool) {
    if (scope == Scope::Below && store.tier(pool) == Tier::G1) continue;
    const auto tier = static_cast<std::size_t>(store.tier(pool));
    const std::unordered_set<std::uint64_t>& resident = resident_[tier];
    std::vector<BlockIdentity>& touched = touched_[tier];
    published += resident.size();
    const auto require = [&](const BlockIdentity& block, bool here) {
      if (here == resident.contains(block.sequence_hash())) return;
      throw Error(ErrorKind::InvariantViolated, "events and store disagree: block ", lineage_text(block.lineage),
                  " of G", tier, here ? " is in the store alone" : " is in the events alone");
    };
    const std::unique_ptr<bool[]> here = std::make_unique<bool[]>(touched.size());
    store.has_blocks(pool, touched, here.get());
    for (std::size_t i = 0; i < touched.size(); ++i) require(touched[i], here[i]);
    touched.clear();
    if (scope == Scope::Whole) {
      for (const BlockIdentity& block : store.resident(pool)) require(block, true);
    }
  }
  if (scope != Scope::Below && published != store.num_hashes()) {
    throw Error(ErrorKind::InvariantViolated, "the events report ", published, " hashes, the store holds ",
                store.num_hashes());
  }
}

void EventTruth::require_prefix(std::span<const BlockIdentity> blocks, std::size_t known) const {
  const std::unordered_set<std::uint64_t>& resident = resident_[static_cast<std::size_t>(Tier::G1)];
  std::size_t published = 0;
  while (published < blocks.size() && resident.contains(blocks[published].sequence_hash())) ++published;
  if (published == known) return;
  throw Error(ErrorKind::InvariantViolated, "a router is shown ", known,
              " leading blocks of a prompt, the events report ", published);
}

}  // namespace understudy
