// The longest hit that all cache groups can serve, for any index that knows which keys are there.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/vllm/groups/kv_group.hpp"

namespace understudy {

struct LongestHit {
  std::uint32_t tokens = 0;
  std::uint32_t first = 0;  // of the first kind, which is full attention if there is any
};

// `find_kind(kind, limit)`: tokens of the longest hit of groups with equal settings.
template <typename FindKind>
LongestHit longest_hit(const GroupLayout& layout, std::uint32_t limit, FindKind find_kind) {
  const auto& kinds = layout.kinds;
  const auto is_full = [&](std::size_t k) { return layout.groups[kinds[k].front()].full(); };
  std::vector<std::uint32_t> found(kinds.size(), 0);
  LongestHit hit{limit, 0};
  for (bool again = false;; again = true) {
    std::uint32_t n = hit.tokens;
    for (std::size_t k = 0; k < kinds.size(); ++k) {
      n = again && is_full(k) ? std::min(n, found[k]) : found[k] = find_kind(kinds[k], n);
      if (!again && k == 0) hit.first = n;
    }
    const bool done = n >= hit.tokens;
    hit.tokens = n;
    if (done || layout.groups.size() == 1 || (kinds.size() == 2 && is_full(0))) return hit;
  }
}

// `present(kind, end)`: whether all groups of the kind have the key of the first `end` tokens. `full_run(kind)`:
// leading tokens of a kind of full attention, in whole blocks. Equal to GroupedBackend::find, without its blocks.
template <typename Present, typename FullRun>
class GroupHit {
 public:
  GroupHit(const GroupLayout& layout, Present present, FullRun full_run)
      : layout_(layout), present_(present), full_run_(full_run) {}

  // Tokens, at most `limit`.
  std::uint32_t find(std::uint32_t limit) const {
    const std::uint32_t length = longest_hit(layout_, limit, [this](const Kind& kind, std::uint32_t most) {
                                   return find_kind(kind, most);
                                 }).tokens;
    return length <= layout_.replay ? 0 : length;
  }

 private:
  using Kind = std::vector<std::size_t>;

  const KvGroup& group(const Kind& kind) const { return layout_.groups[kind.front()]; }

  std::uint32_t find_kind(const Kind& kind, std::uint32_t limit) const {
    if (group(kind).slides()) return find_window(kind, limit);
    if (group(kind).kind == GroupKind::ChunkedLocal) return find_local(kind, limit);
    if (group(kind).kind == GroupKind::State) return find_state(kind, limit);
    return find_full(kind, limit);
  }

  std::uint32_t find_full(const Kind& kind, std::uint32_t limit) const {
    const std::uint32_t block = group(kind).block_size;
    const std::uint32_t unit = layout_.hit_unit;
    std::uint32_t length = std::min(full_run_(kind), limit / block * block);
    if (unit < block) {  // a hit may end inside the next block
      for (std::uint32_t end = std::min(limit, length + block - 1) / unit * unit; end > length; end -= unit) {
        if (present_(kind, end)) {
          length = end;
          break;
        }
      }
    }
    return length / unit * unit;
  }

  std::uint32_t find_window(const Kind& kind, std::uint32_t limit) const {
    const std::uint32_t block = group(kind).block_size;
    const std::uint32_t need = group(kind).window_blocks();
    std::uint32_t run = 0;
    for (std::uint32_t i = limit / block; i-- > 0;) {
      if (!present_(kind, (i + 1) * block)) {
        run = 0;
      } else if (run > 0 || (i + 1) * block % layout_.hit_unit == 0) {
        if (++run == need) return (i + run) * block;
      }
    }
    return run * block;
  }

  std::uint32_t find_local(const Kind& kind, std::uint32_t limit) const {
    const KvGroup& its = group(kind);
    std::uint32_t length = limit / its.chunk * its.chunk;  // before it nothing is read
    while (length + its.block_size <= limit && present_(kind, length + its.block_size)) length += its.block_size;
    return length;
  }

  std::uint32_t find_state(const Kind& kind, std::uint32_t limit) const {
    const std::uint32_t unit = layout_.hit_unit;
    for (std::uint32_t end = limit / unit * unit; end > 0; end -= unit) {
      if (present_(kind, end)) return end;
    }
    return 0;
  }

  const GroupLayout& layout_;
  Present present_;
  FullRun full_run_;
};

}  // namespace understudy
