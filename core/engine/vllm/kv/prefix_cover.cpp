#include "engine/vllm/kv/prefix_cover.hpp"

#include <algorithm>

namespace understudy {

void PrefixCover::look_up(std::span<const BlockName> names) {
  path_.clear();
  for (Cover& cover : covers_) cover.known = false;
  const PrefixTree& tree = pool_.tree();
  const PrefixNode* node = &tree.root();
  for (std::uint32_t done = 0; done < names.size();) {
    node = tree.child(*node, names[done]);
    if (node == nullptr) return;
    const std::uint32_t same = PrefixTree::matching(*node, 0, names, done);
    path_.push_back({node, done, same});
    done += same;
    if (same < node->names.size()) return;
  }
}

const std::vector<PrefixCover::Part>& PrefixCover::parts(std::size_t group) {
  Cover& cover = covers_[group];
  if (cover.known) return cover.parts;
  cover.known = true;
  cover.parts.clear();
  for (const Step& step : path_) {
    if (step.node->layered) {
      add_layers(step, group, cover.parts);
      continue;
    }
    for (BlockRun* run = step.node->copies[group]; run != nullptr && run->first < step.names; run = run->next_copy) {
      const std::uint32_t end = std::min(step.names, run->end());
      cover.parts.push_back({run, step.position + run->first, step.position + end, 0});
    }
  }
  return cover.parts;
}

// Each run adds what those before it have left.
void PrefixCover::add_layers(const Step& step, std::size_t group, std::vector<Part>& out) {
  const auto begin = static_cast<std::ptrdiff_t>(out.size());
  for (BlockRun* run = step.node->copies[group]; run != nullptr; run = run->next_copy) {
    if (run->first >= step.names) continue;
    const std::uint32_t origin = step.position + run->first;
    const std::uint32_t end = step.position + std::min(step.names, run->end());
    std::uint32_t at = origin;
    const std::size_t known = out.size();
    const auto add_up_to = [&](std::uint32_t to) {
      if (at < to) out.push_back({run, at, to, at - origin});
    };
    const auto later = std::ranges::lower_bound(out.begin() + begin, out.end(), at + 1, {}, &Part::end);
    for (auto i = static_cast<std::size_t>(later - out.begin()); i < known && at < end; ++i) {
      const Part other = out[i];
      if (other.first >= end) break;
      add_up_to(other.first);
      at = other.end;
    }
    add_up_to(end);
    const bool follows = known == static_cast<std::size_t>(begin) || known == out.size() ||
                         out[known - 1].first < out[known].first;  // mostly
    if (!follows) std::ranges::sort(out.begin() + begin, out.end(), {}, &Part::first);
  }
}

std::uint32_t PrefixCover::prefix(std::span<const std::size_t> groups, std::uint32_t limit) {
  for (const std::size_t group : groups) {
    std::uint32_t end = 0;
    for (const Part& part : parts(group)) {
      if (part.first != end || end >= limit) break;
      end = part.end;
    }
    limit = std::min(limit, end);
  }
  return limit;
}

std::uint32_t PrefixCover::last_window(std::span<const std::size_t> groups, std::uint32_t limit, std::uint32_t need) {
  std::uint32_t end = limit;
  for (bool whole = false; end > 0 && !whole;) {
    const std::uint32_t least = need > 0 && end >= need ? end - need : 0;
    std::uint32_t first = 0;  // from there on all groups have each block
    whole = true;
    for (const std::size_t group : groups) {
      const std::vector<Part>& those = parts(group);
      auto part = std::ranges::lower_bound(those, end, {}, &Part::first);
      if (part == those.begin()) return 0;
      --part;
      if (part->end < end) {
        end = part->end;
        whole = false;
        break;
      }
      while (part->first > least && part != those.begin() && std::prev(part)->end == part->first) --part;
      first = std::max(first, part->first);
    }
    if (!whole || first <= least) continue;
    end = first;
    whole = false;
  }
  return end;
}

void PrefixCover::clip(std::size_t group, std::uint32_t first, std::uint32_t end, std::vector<BlockPool::Piece>& out) {
  out.clear();
  for (const Part& part : parts(group)) {
    const std::uint32_t from = std::max(first, part.first);
    const std::uint32_t to = std::min(end, part.end);
    if (from < to) out.push_back({part.run, part.offset + from - part.first, to - from});
  }
}

}  // namespace understudy
