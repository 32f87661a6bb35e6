// The longest hit that all groups can serve.
#include <algorithm>

#include "engine/vllm/groups/grouped_backend.hpp"

namespace understudy {

KvHit GroupedBackend::find(KvRequest& request, std::uint32_t limit) {
  Record& r = record(request);
  r.junction = 0;
  for (auto& hits : hits_) hits.clear();
  std::ranges::fill(unreferenced_, 0);
  if (!config_.enable_prefix_caching) return {};
  need_names(request, limit);
  const auto& kinds = layout_.kinds;
  std::vector<std::uint32_t> found(kinds.size(), 0);
  std::uint32_t length = limit;
  std::uint32_t first = 0;
  for (bool again = false;; again = true) {
    std::uint32_t n = length;
    for (std::size_t k = 0; k < kinds.size(); ++k) {
      if (again && layout_.groups[kinds[k].front()].full()) {
        n = std::min(n, found[k]);
        continue;
      }
      n = found[k] = find_kind(request, kinds[k], n);
      if (!again && k == 0) first = n;
    }
    const bool done = n >= length;
    length = n;
    if (done || layout_.groups.size() == 1) break;
    if (kinds.size() == 2 && layout_.groups[kinds.front().front()].full()) break;
  }
  if (layout_.groups.size() > 1 && first > length) r.junction = first;
  if (length <= layout_.replay && !config_.offload) length = 0;  // a host may have more
  KvHit hit;
  hit.tokens = length;
  for (std::size_t g = 0; g < hits_.size(); ++g) {
    if (length == 0) hits_[g].clear();
    const std::size_t most = (length + layout_.groups[g].block_size - 1) / layout_.groups[g].block_size;
    if (layout_.groups[g].full() && hits_[g].size() > most) hits_[g].resize(most);
    for (const SlotId block : hits_[g]) unreferenced_[g] += block != kNoSlot && pool_.references(block) == 0;
    hit.unreferenced += unreferenced_[g];
  }
  return hit;
}

std::uint64_t GroupedBackend::evictions_until_lost() const {
  std::uint64_t cached = pool_.num_cached();  // blocks of the hit that come free later are behind them
  for (const auto& hits : hits_) {
    for (const SlotId block : hits) {
      if (block != kNoSlot && pool_.references(block) == 0) cached = std::min(cached, pool_.cached_before(block));
    }
  }
  return std::ranges::all_of(hits_, [](const auto& hits) { return hits.empty(); }) ? kImpossible
                                                                                   : pool_.evictions() + cached;
}

void GroupedBackend::touch(const KvRequest& request, const std::vector<std::size_t>& kind, std::uint32_t first,
                           std::uint32_t last) const {
  for (const std::size_t g : kind) {
    for (std::uint32_t i = first; i < last; ++i) pool_.touch_found(key_at(request.blocks, g, i));
  }
}

bool GroupedBackend::look_up(const KvRequest& request, const std::vector<std::size_t>& kind, std::uint32_t index) {
  return look_up_key(kind, key_at(request.blocks, kind.front(), index));
}

bool GroupedBackend::look_up_end(const KvRequest& request, const std::vector<std::size_t>& kind, std::uint32_t end) {
  return look_up_key(kind, key_of(request.blocks, kind.front(), end));
}

// Groups of a kind differ in the number of the group alone.
bool GroupedBackend::look_up_key(const std::vector<std::size_t>& kind, GroupKey key) {
  row_.clear();
  for (const std::size_t g : kind) {
    key.group = static_cast<std::uint8_t>(g);
    const SlotId block = pool_.find(key);
    if (block == kNoSlot) return false;
    row_.push_back(block);
  }
  return true;
}

std::uint32_t GroupedBackend::find_kind(const KvRequest& request, const std::vector<std::size_t>& kind,
                                        std::uint32_t limit) {
  for (const std::size_t g : kind) hits_[g].clear();
  const KvGroup& group = layout_.groups[kind.front()];
  if (group.slides()) return find_window(request, kind, limit);
  if (group.kind == GroupKind::ChunkedLocal) return find_local(request, kind, limit);
  if (group.kind == GroupKind::State) return find_state(request, kind, limit);
  return find_full(request, kind, limit);
}

std::uint32_t GroupedBackend::find_full(const KvRequest& request, const std::vector<std::size_t>& kind,
                                        std::uint32_t limit) {
  const std::uint32_t block = layout_.groups[kind.front()].block_size;
  const std::uint32_t unit = layout_.hit_unit;
  const auto push = [&] {
    for (std::size_t i = 0; i < kind.size(); ++i) hits_[kind[i]].push_back(row_[i]);
  };
  const std::uint32_t most = limit / block;
  std::uint32_t blocks = 0;
  for (std::uint32_t touched = 1; blocks < most; ++blocks) {  // the first block is often absent
    if (blocks == touched) {
      touched = std::min(most, touched + kBatch);
      touch(request, kind, blocks, touched);
    }
    if (!look_up(request, kind, blocks)) break;
    push();
  }
  std::uint32_t length = blocks * block;
  if (unit < block) {  // a hit may end inside the next block
    for (std::uint32_t end = std::min(limit, length + block - 1) / unit * unit; end > length; end -= unit) {
      if (!look_up_end(request, kind, end)) continue;
      push();
      length = end;
      break;
    }
  }
  return length / unit * unit;
}

// The last run of blocks that covers a window, or else the run from the first block on.
std::uint32_t GroupedBackend::find_window(const KvRequest& request, const std::vector<std::size_t>& kind,
                                          std::uint32_t limit) {
  const KvGroup& group = layout_.groups[kind.front()];
  const std::uint32_t block = group.block_size;
  const std::uint32_t need = group.window_blocks();
  for (const std::size_t g : kind) hits_[g].assign(limit / block, kNoSlot);
  const auto end_at = [&](std::uint32_t blocks) {
    for (const std::size_t g : kind) hits_[g].resize(blocks);
    return blocks * block;
  };
  std::uint32_t run = 0;
  std::uint32_t touched = limit / block;
  for (std::uint32_t i = limit / block; i-- > 0;) {
    if (i < touched && run > 0) {  // most blocks are absent
      touched = i + 1 - std::min(kBatch, i + 1);
      touch(request, kind, touched, i + 1);
    }
    if (!look_up(request, kind, i)) {
      for (const std::size_t g : kind) std::fill_n(hits_[g].begin() + i + 1, run, kNoSlot);
      run = 0;
      continue;
    }
    if (run == 0 && (i + 1) * block % layout_.hit_unit != 0) continue;
    ++run;
    for (std::size_t m = 0; m < kind.size(); ++m) hits_[kind[m]][i] = row_[m];
    if (run == need) return end_at(i + run);
  }
  return end_at(run);
}

std::uint32_t GroupedBackend::find_local(const KvRequest& request, const std::vector<std::size_t>& kind,
                                         std::uint32_t limit) {
  const KvGroup& group = layout_.groups[kind.front()];
  std::uint32_t length = limit / group.chunk * group.chunk;  // before it nothing is read
  for (const std::size_t g : kind) hits_[g].assign(length / group.block_size, kNoSlot);
  while (length + group.block_size <= limit && look_up(request, kind, length / group.block_size)) {
    for (std::size_t i = 0; i < kind.size(); ++i) hits_[kind[i]].push_back(row_[i]);
    length += group.block_size;
  }
  return length;
}

std::uint32_t GroupedBackend::find_state(const KvRequest& request, const std::vector<std::size_t>& kind,
                                         std::uint32_t limit) {
  const std::uint32_t block = layout_.groups[kind.front()].block_size;
  for (std::uint32_t end = limit / layout_.hit_unit * layout_.hit_unit; end > 0; end -= layout_.hit_unit) {
    if (!look_up_end(request, kind, end)) continue;
    for (std::size_t i = 0; i < kind.size(); ++i) {
      hits_[kind[i]].assign((end + block - 1) / block, kNoSlot);
      hits_[kind[i]].back() = row_[i];
    }
    return end;
  }
  return 0;
}

}  // namespace understudy
