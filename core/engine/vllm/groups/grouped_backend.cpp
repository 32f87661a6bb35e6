#include "engine/vllm/groups/grouped_backend.hpp"

#include <algorithm>
#include <unordered_set>

#include "base/errors.hpp"
#include "engine/vllm/groups/group_hit.hpp"

namespace understudy {

GroupLayout layout_of(const VllmConfig& c) {
  return GroupLayout({c.groups, c.enable_prefix_caching, c.async_scheduling, c.max_model_len, c.max_num_batched_tokens,
                      c.prefix_match_unit, c.prefix_cache_retention_interval});
}

namespace {

constexpr std::uint64_t kNever = ~std::uint64_t{0};

std::uint64_t round_up(std::uint64_t tokens, std::uint64_t unit) { return (tokens + unit - 1) / unit * unit; }

}  // namespace

GroupedBackend::GroupedBackend(const VllmConfig& config)
    : config_(config),
      layout_(layout_of(config)),
      unreferenced_(layout_.groups.size()),
      held_blocks_(layout_.groups.size()) {
  for (const KvGroup& group : layout_.groups) {
    has_rswa_ |= group.kind == GroupKind::Rswa;
    has_tails_ |=
        (group.kind == GroupKind::Full || group.kind == GroupKind::Mla) && group.block_size != layout_.hash_block;
  }
}

// The longest hit that all groups can serve.
KvHit GroupedBackend::find(KvRequest& request, std::uint32_t limit) {
  Record& r = record(request);
  r.junction = 0;
  std::ranges::fill(unreferenced_, 0);
  const bool caches = config_.enable_prefix_caching;
  if (caches) need_names(request, limit);
  begin_find(request, caches ? limit : 0);
  if (!caches) return {};
  const LongestHit longest =
      longest_hit(layout_, limit, [&](const Kind& kind, std::uint32_t most) { return find_kind(request, kind, most); });
  std::uint32_t length = longest.tokens;
  if (layout_.groups.size() > 1 && longest.first > length) r.junction = longest.first;
  if (length <= layout_.replay && !config_.offload) length = 0;  // a host may have more
  end_find(length);
  KvHit hit;
  hit.tokens = length;
  for (const std::uint64_t blocks : unreferenced_) hit.unreferenced += blocks;
  return hit;
}

void GroupedBackend::received(KvRequest& request, std::uint32_t computed) {
  if (computed > 0) key(request, computed);
}

void GroupedBackend::count_lookup(std::uint32_t queries, std::uint32_t hits, bool preempted) {
  if (!config_.enable_prefix_caching) return;
  GroupHitStats& stats = stats_[preempted ? 1 : 0];
  ++stats.requests;
  stats.queries += queries;
  stats.hits += hits;
}

void GroupedBackend::count_admission(const KvRequest& request, std::uint32_t hits) {
  if (!config_.enable_prefix_caching) return;
  const std::uint32_t first = record(request).junction;
  ++admitted_.admissions;
  admitted_.shortened += first > hits;
  admitted_.queries += request.known;
  admitted_.hits += hits;
  admitted_.full_hits += std::max(hits, first);
}

GroupReport GroupedBackend::report() const {
  GroupReport out = admitted_;
  out.has_full = !layout_.kinds.empty() && layout_.groups[layout_.kinds.front().front()].full();
  out.samples = held_blocks_.samples();
  out.peaks = held_blocks_.peaks();
  return out;
}

// ── Watch ──

std::vector<std::uint64_t> GroupedBackend::held(std::span<const RequestSlot> requests) const {
  std::vector<std::uint64_t> counts(layout_.groups.size(), 0);
  for (const RequestSlot slot : requests) {
    for (std::size_t g = 0; g < counts.size(); ++g) counts[g] += num_held(records_[slot].groups[g], g);
  }
  return counts;
}

void GroupedBackend::check(std::span<const RequestSlot> holders, std::uint64_t kept) const {
  std::uint64_t references = kept;
  for (const std::uint64_t blocks : held(holders)) references += blocks;
  check_pool(references);
  std::vector<std::unordered_set<SlotId>> distinct(layout_.groups.size());
  std::vector<SlotId> room;
  for (const Record& r : records_) {
    for (std::size_t g = 0; g < r.groups.size(); ++g) {
      for (const SlotId block : entries(r.groups[g], room)) {
        if (block != kNoSlot) distinct[g].insert(block);
      }
    }
  }
  for (std::size_t g = 0; g < distinct.size(); ++g) {
    if (held_blocks_.counts()[g] == distinct[g].size()) continue;
    throw Error(ErrorKind::InvariantViolated, "requests hold ", distinct[g].size(), " blocks of group ", g, ", ",
                held_blocks_.counts()[g], " are counted");
  }
  for (std::size_t slot = 0; slot < records_.size(); ++slot) {
    if (std::ranges::find(holders, slot) != holders.end()) continue;
    for (const GroupTable& table : records_[slot].groups) {
      if (table.size() > 0) throw Error(ErrorKind::InvariantViolated, "a request that does not run holds blocks");
    }
  }
}

std::uint64_t GroupedBackend::digest(std::span<const RequestSlot> running) const {
  std::uint64_t hash = available() * 31 + usage().cached;
  std::vector<SlotId> room;
  const auto mix = [&hash](std::uint64_t value) { hash = (hash ^ value) * 0x9E3779B97F4A7C15u; };
  for (const RequestSlot slot : running) {
    for (const GroupTable& table : records_[slot].groups) {
      mix(table.size());
      mix(table.keyed);
      for (const SlotId block : entries(table, room)) mix(block != kNoSlot);
    }
  }
  return hash;
}

// ── Decode steps that a fast-forward skips, because they change no block of a request ──

bool GroupedBackend::settled(const KvRequest& request) const {
  return std::ranges::all_of(records_[request.slot].groups,
                             [](const GroupTable& table) { return table.tail == Tail::None && !table.checkpoint; });
}

std::uint64_t GroupedBackend::steps_to_change(const KvRequest& request, std::uint32_t position) const {
  const Record& r = records_[request.slot];
  std::uint64_t next = kNever;
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const KvGroup& group = layout_.groups[g];
    if (group.kind == GroupKind::Circular) continue;
    const GroupTable& table = r.groups[g];
    next = std::min({next, std::uint64_t{table.size()} * group.block_size, next_slide(request, table, group),
                     next_keys(table, group)});
  }
  return next - std::min<std::uint64_t>(next, position);
}

// The position whose step leaves a block behind.
std::uint64_t GroupedBackend::next_slide(const KvRequest& request, const GroupTable& table,
                                         const KvGroup& group) const {
  const std::uint64_t in_flight = config_.async_scheduling ? 1 : 0;
  if (group.kind != GroupKind::Rswa) {
    const std::uint64_t tokens = group.tokens_to_skip((std::uint64_t{table.slid} + 1) * group.block_size);
    return tokens == kNever ? kNever : tokens + in_flight;
  }
  const std::uint64_t first =
      std::max<std::uint64_t>(table.slid, ceil_div(request.spec.prompt_tokens, group.block_size));
  return (first + 1) * group.block_size + group.window + in_flight;
}

// The position whose step fills a block, which may get a key.
std::uint64_t GroupedBackend::next_keys(const GroupTable& table, const KvGroup& group) const {
  if (!config_.enable_prefix_caching || !group.cacheable()) return kNever;
  return tokens_to_key(table, group) - (config_.async_scheduling ? 0 : 1);
}

std::uint64_t GroupedBackend::tokens_to_key(const GroupTable& table, const KvGroup& group) const {
  const std::uint64_t end = (std::uint64_t{table.keyed} + 1) * group.block_size;
  return rounds_keys() ? round_up(end, layout_.scheduler_block) : end;
}

std::uint64_t GroupedBackend::step_cost(const KvRequest& request, std::uint32_t position) const {
  const Record& r = records_[request.slot];
  std::uint64_t blocks = 0;
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const KvGroup& group = layout_.groups[g];
    if (group.kind == GroupKind::Circular) continue;
    blocks += ceil_div(std::uint64_t{position} + 1, group.block_size) > r.groups[g].size();
  }
  return blocks;
}

std::uint64_t GroupedBackend::step_frees(const KvRequest& request, std::uint32_t position) const {
  const Record& r = records_[request.slot];
  const std::uint32_t tokens = position - (config_.async_scheduling ? 1 : 0);
  std::uint64_t blocks = 0;
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const KvGroup& group = layout_.groups[g];
    const GroupTable& table = r.groups[g];
    const std::size_t end = group.kind == GroupKind::Rswa ? table.size() : group.skipped(tokens) / group.block_size;
    blocks += std::min(end, table.size()) - std::min<std::size_t>({end, table.size(), table.slid});
  }
  return blocks;
}

KvBackend::Room GroupedBackend::decode(KvRequest& request, std::uint32_t position, std::int64_t now_ns) {
  Record& r = records_[request.slot];
  slide(request, r, position - (config_.async_scheduling ? 1 : 0));
  if (need_all(request, position, position + 1, false, false) > available()) return Room::Short;
  if (const Room room = reserve(request, r, position + 1, now_ns); room != Room::Taken) return room;
  grow_all(request, r, position + 1);
  remember_keyed(r);
  key(request, position + (config_.async_scheduling ? 0 : 1));
  skip_to(request, position + 1);
  return Room::Taken;
}

void GroupedBackend::skip_to(const KvRequest& request, std::uint32_t computed) {
  Record& r = records_[request.slot];
  r.computed = computed;
  r.computed_before = computed - 1;
  r.computed_earlier = computed - std::min(computed, 2u);
  r.last_tokens = 1;
  r.last_schedule = schedule_;
}

}  // namespace understudy
