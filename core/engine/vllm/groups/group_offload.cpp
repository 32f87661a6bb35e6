#include "engine/vllm/groups/group_offload.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "engine/vllm/groups/chunk_key.hpp"

namespace understudy {

GroupOffload::GroupOffload(const VllmOffload& config, BlockGroups& backend, std::uint64_t num_device_blocks,
                           BlockStore& store)
    : OffloadConnector(config, backend.layout().hash_block, true, store, num_device_blocks),
      backend_(backend),
      layout_(backend.layout()) {
  fences_early_ = true;
  std::set<std::uint32_t> full_chunks;
  std::uint32_t widest = 0;
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const KvGroup& group = layout_.groups[g];
    Group out{group.block_size, group.block_size * config.blocks_per_chunk, std::nullopt};
    if (!group.cacheable()) {  // without keys: not offloaded
      groups_.push_back(out);
      continue;
    }
    if (group.slides()) out.window = ceil_div(group.window, out.chunk);
    if (group.kind == GroupKind::ChunkedLocal) out.window = ceil_div(group.chunk, out.chunk);
    if (group.state()) {
      out.window = 1;
      if (state_chunk_ > 0 && state_chunk_ != out.chunk) {
        throw Error(ErrorKind::ConfigError, "groups: vLLM's offload needs state groups of one block_size, got ",
                    state_chunk_ / config.blocks_per_chunk, " and ", group.block_size);
      }
      state_chunk_ = out.chunk;
    } else {
      stored_.push_back(g);
    }
    if (out.window && layout_.retention && *layout_.retention % out.chunk != 0) {
      throw Error(ErrorKind::ConfigError, "prefix_cache_retention_interval: ", *layout_.retention,
                  " tokens are not a multiple of the offload's chunks of ", out.chunk);
    }
    (out.window ? windows_ : full_).push_back(g);
    if (!out.window) full_chunks.insert(out.chunk);
    widest = std::max(widest, out.chunk);
    groups_.push_back(out);
    offloaded_.push_back(g);
  }
  std::ranges::stable_sort(windows_,
                           [this](std::size_t a, std::size_t b) { return groups_[a].window > groups_[b].window; });
  if (full_chunks.size() == 1) alignment_ = *full_chunks.begin();
  if (full_chunks.empty()) alignment_ = widest;
  if (state_chunk_ == 0) return;
  has_tails_ = config.blocks_per_chunk == 1 && state_chunk_ > layout_.hash_block &&
               std::ranges::all_of(offloaded_, [this](std::size_t g) {
                 return groups_[g].chunk == state_chunk_ && (!groups_[g].window || layout_.groups[g].state());
               });
  backend.list_states(config.prompt_only ? BlockGroups::KeptStates::OfPrompts : BlockGroups::KeptStates::All);
}

void GroupOffload::came(const KvRequest& request) {
  OffloadConnector::came(request);
  const std::uint32_t index = seats_[request.slot].tracked;
  if (states_.size() <= index) states_.resize(index + 1);
  states_[index] = {};
  states_[index].groups.resize(groups_.size());
}

// ── Keys ──

void GroupOffload::name_all(KvRequest& request) const {
  const std::size_t units = request.known / layout_.hash_block;
  if (request.blocks.size() < units) request.spec.identities->extend(request.blocks, units);
}

BlockIdentity GroupOffload::key(BlockIdentity last, std::size_t group) {
  last.lineage = chunk_of_group(last.lineage, group);
  return last;
}

ChunkMemo& GroupOffload::memo(State& state, Chunk chunk) const {
  Held& held = state.groups[chunk.group];
  if (chunk.end % groups_[chunk.group].chunk != 0) return held.tail_memos[chunk.end];
  const std::uint32_t index = index_of(chunk);
  if (held.memos.size() <= index) held.memos.resize(index + 1);
  return held.memos[index];
}

VllmHost::Found GroupOffload::find(State& state, std::span<const BlockIdentity> names, Chunk chunk) {
  const BlockIdentity wanted = key(last(names, chunk), chunk.group);
  return host_.find({&wanted, 1}, {&memo(state, chunk), 1});
}

// ── Admission ──

std::optional<std::uint32_t> GroupOffload::look_up(KvRequest& request, std::uint32_t local, std::int64_t now_ns) {
  Tracked& tracked = of(request);
  State& state = state_of(request);
  for (Held& held : state.groups) {
    held.blocks.clear();
    held.reported = 0;
    held.next_stored = 0;
  }
  std::optional<std::uint32_t> hit;
  if (tracked.jobs.empty()) {
    name_all(request);
    hit = scan(state, request, local);
    if (hit && has_tails_) hit = scan_tails(state, request, local, *hit);
    ++samples_.lookups;
    if (hit) {
      answered(tracked, now_ns);
    } else if (tracked.deferred_ns < 0) {
      tracked.deferred_ns = now_ns;
    }
  }
  ++totals_.lookups;
  if (!hit) ++totals_.deferred_lookups;
  if (config_.log) log_.lookups.push_back({request.id, local, hit});
  return hit;
}

std::uint32_t GroupOffload::load_window(std::size_t g, std::uint32_t tokens) const {
  const Group& group = groups_[g];
  if (!layout_.groups[g].slides()) return *group.window;
  // The window ends with the hit, possibly a chunk to the left.
  const std::uint32_t padding = (group.chunk - tokens % group.chunk) % group.chunk;
  return std::max(*group.window, ceil_div(std::uint64_t{layout_.groups[g].window} - 1 + padding, group.chunk));
}

// Tokens that all groups can load behind the local ones.
std::optional<std::uint32_t> GroupOffload::scan(State& state, const KvRequest& request, std::uint32_t local) {
  const std::span<const BlockIdentity> names = request.blocks;
  std::vector<std::size_t> all = full_;
  all.insert(all.end(), windows_.begin(), windows_.end());
  std::uint32_t bound = request.known - (windows_.empty() ? 0 : 1);
  if (state_chunk_ > 0) bound = bound / state_chunk_ * state_chunk_;
  std::uint32_t hit = 0;
  bool deferred = false;
  for (std::vector<std::size_t> groups = all; !groups.empty();) {
    std::vector<std::size_t> again;
    bool windowed = false;
    for (const std::size_t g : groups) {
      const std::uint32_t chunk = groups_[g].chunk;
      const std::uint32_t keys = request.known / chunk;
      bound = std::min(bound, keys * chunk);
      if (bound < local + chunk) return 0;  // a part of a chunk is not worth it
      const std::uint32_t first = local / chunk;
      const std::uint32_t end = std::min(ceil_div(bound, chunk), keys);
      const std::optional<std::uint32_t> found =
          groups_[g].window ? find_window(state, names, g, first, end, bound) : find_run(state, names, g, first, end);
      if (found == 0u) return 0;
      if (found) {
        bound = std::min(bound, chunk * (first + *found));
      } else {
        deferred = true;
      }
      if (bound < local + chunk) return 0;
      if (bound - local < hit) {
        if (deferred) {  // perhaps for chunks that are not needed
          deferred = false;
          again = all;
        } else if (windowed && again.empty()) {
          again = windows_;
        }
      }
      windowed = windowed || groups_[g].window;
      hit = bound - local;
    }
    groups = std::move(again);
  }
  if (deferred || (defers_to_loads_ && is_loading(state, names, local, local + hit))) return std::nullopt;
  return hit;
}

// Leading chunks that are on the host; none: one of them is being written.
std::optional<std::uint32_t> GroupOffload::find_run(State& state, std::span<const BlockIdentity> names, std::size_t g,
                                                    std::uint32_t first, std::uint32_t end) {
  bool writing = false;
  std::uint32_t index = first;
  for (; index < end; ++index) {
    const VllmHost::Found found = find(state, names, chunk_at(g, index));
    if (found.chunks == 0) break;
    writing = writing || found.writing;
  }
  if (writing) return std::nullopt;
  return index - first;
}

// Chunks up to the end of the last run that covers the window.
std::optional<std::uint32_t> GroupOffload::find_window(State& state, std::span<const BlockIdentity> names,
                                                       std::size_t g, std::uint32_t first, std::uint32_t end,
                                                       std::uint32_t bound) {
  std::uint32_t need = load_window(g, std::min(bound, end * groups_[g].chunk));
  bool writing = false;
  std::uint32_t run = 0;
  for (std::uint32_t index = end; index-- > first;) {
    const VllmHost::Found found = find(state, names, chunk_at(g, index));
    if (found.chunks == 0) {
      run = 0;
      writing = false;
      need = *groups_[g].window;
      continue;
    }
    writing = writing || found.writing;
    if (++run == need) {
      if (writing) return std::nullopt;
      return index - first + need;
    }
  }
  if (writing) return std::nullopt;
  return run;
}

bool GroupOffload::is_loading(State& state, std::span<const BlockIdentity> names, std::uint32_t local,
                              std::uint32_t total) {
  for (const std::size_t g : offloaded_) {
    std::uint32_t first = local / groups_[g].chunk;
    const std::uint32_t end = ceil_div(total, groups_[g].chunk);
    if (groups_[g].window) first = std::max(first, end - std::min(end, load_window(g, total)));
    for (std::uint32_t index = first; index < end; ++index) {
      if (find(state, names, chunk_at(g, index)).loading) return true;
    }
  }
  return false;
}

bool GroupOffload::can_load(const KvRequest& request, std::uint32_t local, std::uint32_t tokens) {
  State& state = state_of(request);
  const std::uint32_t total = local + tokens;
  for (const std::size_t g : windows_) {
    const std::uint32_t first = std::max(local, layout_.groups[g].skipped(total) / groups_[g].block * groups_[g].block);
    for (std::uint32_t index = first / groups_[g].chunk; index < ceil_div(total, groups_[g].chunk); ++index) {
      const VllmHost::Found found = find(state, request.blocks, chunk_at(g, index));
      if (found.chunks == 0 || found.writing) return false;
    }
  }
  return true;
}

void GroupOffload::begin_load(const KvRequest& request, std::uint32_t local, std::uint32_t tokens) {
  const std::uint32_t index = seats_[request.slot].tracked;
  State& state = states_[index];
  const std::uint32_t total = local + tokens;
  OffloadJob& job = new_job(index, false);
  chosen_.clear();
  for (std::size_t g = 0; g < groups_.size(); ++g) report_allocated(backend_.table(request, g));
  for (const std::size_t g : offloaded_) {
    const Group& group = groups_[g];
    const std::span<const SlotId> table = backend_.table(request, g);
    // The allocation has left out what a window does not read.
    const std::uint32_t end = ceil_div(total, group.block);
    std::uint32_t first = ceil_div(local, group.block);
    while (first < end && table[first] == kNoSlot) ++first;
    const std::uint32_t chunks = ceil_div(total, group.chunk);
    if (first < end) {
      for (std::uint32_t chunk = first / config_.blocks_per_chunk; chunk < chunks; ++chunk) {
        const std::uint32_t last = chunk_at(g, chunk).end;
        chosen_.push_back({g, has_tails_ ? std::min(last, total) : last});
      }
    }
    job.device.insert(job.device.end(), table.begin() + first, table.begin() + end);
    state.groups[g].next_stored = chunks;
  }
  gather(state, request.blocks);
  host_.begin_load(user(tracked_[index]), chosen_keys_, chosen_memos_, job.host);
  scatter(state);
  for (const Chunk& chunk : chosen_) {
    job.chunks.push_back(index_of(chunk));
    job.groups.push_back(chunk.group);
  }
  orders_.loads.push_back(job.id);
  ++totals_.loads;
  totals_.loaded_chunks += chosen_.size();
  totals_.loaded_tokens += tokens;
  if (!config_.log) return;
  OffloadLog::Load load{job, tokens, {}, {}};
  for (const BlockIdentity& one : chosen_keys_) load.hashes.push_back(one.sequence_hash());
  log_.loads.push_back(std::move(load));
}

// ── Schedule ──

void GroupOffload::preempted(const KvRequest& request) {
  const Tracked& tracked = of(request);
  orders_.flush.insert(orders_.flush.end(), tracked.jobs.begin(), tracked.jobs.end());
}

void GroupOffload::scheduled(KvRequest& request, std::uint32_t after, bool admitted, bool) {
  State& state = state_of(request);
  state.updated_in = schedule_;
  state.junction = backend_.junction(request);
  std::uint32_t tokens = std::min(after, request.known);
  if (config_.prompt_only) tokens = std::min(tokens, request.spec.prompt_tokens);
  bool offers = false;
  if (admitted) {  // also blocks of groups that are not offloaded
    for (std::size_t g = 0; g < groups_.size(); ++g) report_allocated(backend_.table(request, g));
  }
  for (const std::size_t g : offloaded_) {
    Held& held = state.groups[g];
    const std::span<const SlotId> table = backend_.table(request, g);
    if (admitted) held.blocks.clear();
    held.reported = held.blocks.size();
    if (held.reported < table.size()) {
      const std::span<const SlotId> fresh = table.subspan(held.reported);
      if (!admitted) report_allocated(fresh);
      held.blocks.insert(held.blocks.end(), fresh.begin(), fresh.end());
    }
    if (!layout_.groups[g].state()) offers = offers || num_storable(held, g, tokens) > held.next_stored;
  }
  if (offers) offers_.push_back({&request, after});
}

void GroupOffload::report_allocated(std::span<const SlotId> table) {
  for (const SlotId& block : table) {
    if (block != kNoSlot) allocated({&block, 1});
  }
}

void GroupOffload::ended(KvRequest& request, std::uint32_t computed, bool aborted, std::int64_t now_ns) {
  state_of(request).junction = backend_.junction(request);
  const Seat seat = std::exchange(seats_[request.slot], {});
  Tracked& tracked = tracked_[seat.tracked];
  answered(tracked, now_ns);
  tracked.has_ended = true;
  tracked.known = request.known;
  tracked.prompt = request.spec.prompt_tokens;
  tracked.after = aborted ? computed : std::max(tracked.prompt, request.known - 1);
  name_all(request);
  tracked.names = std::move(request.blocks);
  request.blocks.clear();
  for (const JobId id : tracked.jobs) fence(jobs_.at(id));
  ended_.push_back(seat.tracked);
}

void GroupOffload::before_flushes() {
  backend_.each_copied([this](SlotId block) { allocated({&block, 1}); });
}

void GroupOffload::before_stores() {
  drop_reused();
  if (!backend_.kept_states().empty()) store_states(backend_.take_kept_states());
}

// A block that a window left behind may have been handed out again, and is not stored any more.
void GroupOffload::drop_reused() {
  if (windows_.empty() || allocated_.empty()) return;
  for (std::uint32_t index = 0; index < states_.size(); ++index) {
    State& state = states_[index];
    if (state.groups.empty()) continue;  // ended
    for (const std::size_t g : windows_) {
      Held& held = state.groups[g];
      const std::size_t end = state.updated_in == schedule_ ? held.reported : held.blocks.size();
      for (std::size_t i = std::size_t{held.next_stored} * config_.blocks_per_chunk; i < end; ++i) {
        if (held.blocks[i] != kNoSlot && allocated_in_[held.blocks[i]] == schedule_) held.blocks[i] = kNoSlot;
      }
    }
  }
}

}  // namespace understudy
