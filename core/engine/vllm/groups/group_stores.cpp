// Stores of vLLM's native host offload with several cache groups: which chunks are worth it.
#include <algorithm>
#include <utility>

#include "engine/vllm/groups/group_offload.hpp"

namespace understudy {

std::uint32_t GroupOffload::num_storable(const Held& held, std::size_t g, std::uint32_t tokens) const {
  return std::min(tokens / groups_[g].chunk, static_cast<std::uint32_t>(held.blocks.size()) / config_.blocks_per_chunk);
}

void GroupOffload::advance(State& state, std::uint32_t tokens) {
  for (const std::size_t g : stored_) {
    Held& held = state.groups[g];
    held.next_stored = std::max(held.next_stored, num_storable(held, g, tokens));
  }
}

void GroupOffload::store_offer(const Offer& offer) {
  KvRequest& request = *offer.request;
  name_all(request);
  store(seats_[request.slot].tracked, request.blocks, request.known, offer.after, request.spec.prompt_tokens, false);
}

void GroupOffload::store_ended(std::uint32_t index) {
  const Tracked& tracked = tracked_[index];
  store(index, tracked.names, tracked.known, tracked.after, tracked.prompt, true);
}

void GroupOffload::store(std::uint32_t index, std::span<const BlockIdentity> names, std::uint32_t known,
                         std::uint32_t after, std::uint32_t prompt, bool finished) {
  State& state = states_[index];
  std::uint32_t tokens = std::min(after, known);
  if (config_.prompt_only) tokens = std::min(tokens, prompt);
  chosen_.clear();
  std::vector<std::uint32_t> ends;
  for (const std::size_t g : stored_) ends.push_back(choose(state, g, tokens, prompt, finished));
  if (chosen_.empty()) return advance(state, tokens);
  gather(state, names);
  bool room = false;
  OffloadJob* const job = offer(index, room);
  if (!room) {
    ++refused_last_;
    return;
  }
  if (job == nullptr) return advance(state, tokens);
  bool flushes = false;
  for (const std::uint32_t place : places_) {
    const Chunk& chunk = chosen_[place];
    const auto blocks = std::span<const SlotId>(state.groups[chunk.group].blocks)
                            .subspan(std::size_t{index_of(chunk)} * config_.blocks_per_chunk, config_.blocks_per_chunk);
    for (const SlotId block : blocks) {
      if (block == kNoSlot) continue;
      job->device.push_back(block);
      // A window may leave its blocks behind while they are read.
      if (groups_[chunk.group].window) {
        fenced_[block].push_back(job->id);
      } else if (finished) {
        fenced_[block].push_back(job->id);
        flushes = flushes || allocated_in_[block] == schedule_;
      }
    }
  }
  for (std::size_t i = 0; i < stored_.size(); ++i) {
    std::uint32_t& next = state.groups[stored_[i]].next_stored;
    next = std::max(next, ends[i]);
  }
  if (flushes) orders_.flush.push_back(job->id);
  log_store(*job);
}

OffloadJob* GroupOffload::offer(std::uint32_t index, bool& room) {
  Tracked& tracked = tracked_[index];
  State& state = states_[index];
  room = host_.begin_store(user(tracked), chosen_keys_, chosen_memos_, places_, slots_);
  scatter(state);
  if (config_.samples && host_.num_absent() > 0) samples_.asked_chunks.push_back(host_.num_absent());
  if (!room) {
    ++totals_.refused_stores;
    ++samples_.refused_stores;
    if (config_.log) log_.refused.push_back(tracked.request);
    return nullptr;
  }
  if (places_.empty()) return nullptr;
  totals_.evicted_chunks += host_.evicted().size();
  ++totals_.stores;
  totals_.stored_chunks += places_.size();
  OffloadJob& job = new_job(index, true);
  job.host = slots_;
  for (const std::uint32_t place : places_) {
    job.chunks.push_back(index_of(chosen_[place]));
    job.groups.push_back(chosen_[place].group);
  }
  orders_.stores.push_back(job.id);
  return &job;
}

void GroupOffload::log_store(const OffloadJob& job) {
  if (!config_.log) return;
  if (!host_.evicted().empty()) log_.evicted.emplace_back();
  for (const LineageHash& one : host_.evicted()) log_.evicted.back().push_back(one.current());
  OffloadLog::Store stored{job, {}};
  for (const std::uint32_t place : places_) stored.hashes.push_back(chosen_keys_[place].sequence_hash());
  log_.stores.push_back(std::move(stored));
}

std::uint32_t GroupOffload::choose(const State& state, std::size_t g, std::uint32_t tokens, std::uint32_t prompt,
                                   bool finished) {
  const Held& held = state.groups[g];
  const Group& group = groups_[g];
  const std::uint32_t per_chunk = config_.blocks_per_chunk;
  const std::uint32_t end = num_storable(held, g, tokens);
  std::uint32_t first = held.next_stored;
  const std::uint32_t prompt_end = prompt / group.chunk;
  const bool dense = !layout_.retention;
  // With every tail kept, the tail of a finished request may begin before what was considered so far.
  const bool slides = layout_.groups[g].slides() && alignment_ > 0 && alignment_ % group.block == 0;
  const bool again = finished && end != prompt_end && dense && slides;
  std::optional<std::uint32_t> horizon;
  if (dense && (finished || end <= prompt_end)) horizon = finished ? end : prompt_end;
  if (again) {
    const std::uint32_t per_segment = alignment_ / group.block;
    first = std::min(first, end * per_chunk / per_segment * per_segment / per_chunk);
  }
  if (end <= first) return end;
  const auto blocks_of = [&](std::optional<std::uint32_t> chunks) {
    return chunks ? std::optional(*chunks * per_chunk) : std::nullopt;
  };
  const std::vector<bool> mask = reachable(state, g, first * per_chunk, end * per_chunk, blocks_of(horizon), prompt);
  const std::vector<bool> before =
      again ? reachable(state, g, first * per_chunk, end * per_chunk, prompt_end * per_chunk, prompt) : mask;
  const auto kept = [&](const std::vector<bool>& of, std::uint32_t block) {
    return of.empty() || of[block - first * per_chunk];
  };
  for (std::uint32_t chunk = first; chunk < end; ++chunk) {
    const std::uint32_t begin = chunk * per_chunk;
    bool any = false;
    bool any_before = false;
    bool whole = held.blocks[begin + per_chunk - 1] != kNoSlot;
    for (std::uint32_t block = begin; block < begin + per_chunk; ++block) {
      any = any || kept(mask, block);
      any_before = any_before || kept(before, block);
      if (held.blocks[block] == kNoSlot && kept(mask, block)) whole = false;
    }
    if (again && chunk < held.next_stored && any_before) continue;
    if (any && whole) chosen_.push_back(chunk_at(g, chunk));
  }
  return end;
}

std::vector<bool> GroupOffload::reachable(const State& state, std::size_t g, std::uint32_t first, std::uint32_t end,
                                          std::optional<std::uint32_t> horizon, std::uint32_t prompt) const {
  const std::uint32_t block = groups_[g].block;
  if (!layout_.groups[g].slides() || alignment_ == 0 || alignment_ % block != 0) return {};
  const std::uint32_t need = layout_.groups[g].window_blocks();
  std::vector<bool> mask(end - first, false);
  const auto keep = [&](std::uint32_t from, std::uint32_t to) {
    for (std::uint32_t i = std::max(first, from); i < std::min(end, to); ++i) mask[i - first] = true;
  };
  if (!layout_.retention || *layout_.retention > 0) {
    const std::uint32_t segment = (layout_.retention ? *layout_.retention : alignment_) / block;
    if (need >= segment) return {};
    for (std::uint32_t i = first; i < end; ++i) {
      if (i % segment >= segment - need) mask[i - first] = true;
    }
    if (horizon && *horizon % segment != 0) {
      keep(std::max(*horizon / segment * segment, *horizon - std::min(*horizon, need)), *horizon);
    }
  }
  if (layout_.retention) {
    const auto keep_before = [&](std::uint32_t tokens) {
      const std::uint32_t tail = tokens / alignment_ * alignment_ / block;
      keep(tail - std::min(tail, need), tail);
    };
    keep_before(prompt - 1);
    if (state.junction > 0) keep_before(state.junction);
  }
  return mask;
}

void GroupOffload::gather(State& state, std::span<const BlockIdentity> names) {
  clear_gathered();
  for (const Chunk& chunk : chosen_) gather_one(state, chunk, last(names, chunk));
}

void GroupOffload::clear_gathered() {
  chosen_keys_.clear();
  chosen_memos_.clear();
  positions_.clear();
}

void GroupOffload::gather_one(State& state, Chunk chunk, const BlockIdentity& last) {
  chosen_keys_.push_back(key(last, chunk.group));
  chosen_memos_.push_back(memo(state, chunk));
  // Where two groups have a chunk, that of the first is evicted first.
  positions_.push_back(std::uint64_t{chunk.end} * groups_.size() + groups_.size() - 1 - chunk.group);
}

void GroupOffload::scatter(State& state) {
  for (std::size_t i = 0; i < chosen_.size(); ++i) {
    memo(state, chosen_[i]) = chosen_memos_[i];
  }
}

// The request's chunks in order of their ends, and of one end in order of their groups, whichever it used first.
void GroupOffload::end_on_host(std::uint32_t index) {
  State& state = states_[index];
  chosen_.clear();
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (std::uint32_t chunk = 0; chunk < state.groups[g].memos.size(); ++chunk) {
      if ((state.groups[g].memos[chunk].uses & kSeen) != 0) chosen_.push_back(chunk_at(g, chunk));
    }
    for (const auto& [end, used] : state.groups[g].tail_memos) {
      if ((used.uses & kSeen) != 0) chosen_.push_back({g, end});
    }
  }
  std::ranges::stable_sort(chosen_, {}, &Chunk::end);
  gather(state, tracked_[index].names);
  host_.ended(chosen_keys_, chosen_memos_);
  states_[index].groups.clear();
}

}  // namespace understudy
