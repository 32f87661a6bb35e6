#include "engine/event_truth.hpp"

#include <memory>

#include "lineage_text.hpp"

namespace understudy {

void EventTruth::apply(std::span<const EventRecord> rows) {
  for (const EventRecord& row : rows) {
    if (!row.sole) continue;
    const BlockIdentity& block = row.identity;
    const auto fail = [&](const char* what) {
      throw Error(ErrorKind::InvariantViolated, "event ", row.id, " ", what, ": block ", lineage_text(block.lineage));
    };
    if (row.kind == EventKind::Removed) {
      if (resident_.erase(block.sequence_hash()) == 0) fail("removes what is not there");
    } else {
      if (block.parent_hash != 0 && !resident_.contains(block.parent_hash)) fail("stores a child before its parent");
      if (!resident_.insert(block.sequence_hash()).second) fail("stores what is there already");
    }
    touched_.push_back(block);
  }
}

void EventTruth::require_equal(const BlockStore& store, bool whole) {
  const auto require = [this](const BlockIdentity& block, bool here) {
    if (here == resident_.contains(block.sequence_hash())) return;
    throw Error(ErrorKind::InvariantViolated, "events and store disagree: block ", lineage_text(block.lineage),
                here ? " is in the store alone" : " is in the events alone");
  };
  const std::unique_ptr<bool[]> here = std::make_unique<bool[]>(touched_.size());
  store.has_blocks(0, touched_, here.get());
  for (std::size_t i = 0; i < touched_.size(); ++i) require(touched_[i], here[i]);
  touched_.clear();
  if (whole) {
    for (const BlockIdentity& block : store.resident(0)) require(block, true);
  }
  if (resident_.size() != store.num_hashes()) {
    throw Error(ErrorKind::InvariantViolated, "events tell of ", resident_.size(), " hashes, the store holds ",
                store.num_hashes());
  }
}

}  // namespace understudy
