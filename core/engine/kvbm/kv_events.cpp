#include "engine/kvbm/kv_events.hpp"

namespace understudy {

namespace {

bool follows(const BlockIdentity& before, const BlockIdentity& block) {
  return block.position() == before.position() + 1 && block.parent_hash == before.sequence_hash();
}

}  // namespace

void KvEventLog::add(const DrainedEvents& call, std::span<const StoredRun> runs) {
  add_kind(call, EventKind::Stored, runs);
  add_kind(call, EventKind::Removed, {});
  kept_.tokens.insert(kept_.tokens.end(), call.tokens.begin(), call.tokens.end());
}

void KvEventLog::add_kind(const DrainedEvents& call, EventKind kind, std::span<const StoredRun> runs) {
  std::size_t row = 0;
  std::uint64_t parent = 0;
  const BlockIdentity* last = nullptr;  // in the consolidated stream
  for (const EventRecord& record : call.records) {
    if (record.kind != kind) continue;
    const bool starts_run = !runs.empty() && runs.front().first == row;
    if (row == 0 || starts_run) ++next_raw_;
    if (starts_run) {
      parent = runs.front().parent;
      runs = runs.subspan(1);
    }
    KvEventRow& out = kept_.rows.emplace_back();
    out.identity = record.identity;
    out.generation = record.generation;
    out.kind = kind;
    out.raw_id = next_raw_ - 1;
    out.raw_parent = parent;
    if (record.sole) {
      const bool joins = last != nullptr && (kind == EventKind::Removed || follows(*last, record.identity));
      if (!joins) ++next_consolidated_;
      out.consolidated_id = next_consolidated_ - 1;
      last = &record.identity;
    }
    ++row;
  }
}

}  // namespace understudy
