#include "traces/delta_prompts.hpp"

#include <algorithm>
#include <cstddef>
#include <map>
#include <unordered_map>
#include <utility>

namespace understudy {

namespace {

struct DeltaRun {
  std::int64_t name = 0;
  std::int64_t tokens = 0;
};

// Numbers of blocks: most lie within one run, and are known by its name.
class DeltaBlocks {
 public:
  explicit DeltaBlocks(std::uint32_t block) : block_(block) {}

  // Add the blocks of `tokens` tokens of runs in a row; the last may be partly filled.
  void append(std::span<const DeltaRun> runs, std::int64_t tokens, std::vector<std::uint32_t>& out) {
    std::size_t at = 0;
    std::int64_t used = 0;  // tokens of the run at hand
    for (std::int64_t start = 0; start < tokens; start += block_) {
      std::int64_t wanted = std::min<std::int64_t>(block_, tokens - start);
      parts_.clear();
      while (wanted > 0) {
        if (used == runs[at].tokens) {
          ++at;
          used = 0;
          continue;
        }
        const std::int64_t part = std::min(wanted, runs[at].tokens - used);
        if (!parts_.empty() && parts_.back().first == runs[at].name) {
          parts_.back().second += part;
        } else {
          parts_.emplace_back(runs[at].name, part);
        }
        used += part;
        wanted -= part;
      }
      out.push_back(number());
    }
  }

 private:
  std::uint32_t number() {
    const bool whole = parts_.size() == 1 && parts_[0].second == block_;
    const auto [place, added] = whole ? insert(whole_, parts_[0].first) : insert(mixed_, parts_);
    if (added) ++next_;
    return place;
  }

  template <typename Map, typename Key>
  std::pair<std::uint32_t, bool> insert(Map& map, const Key& key) {
    const auto [place, added] = map.try_emplace(key, next_);
    return {place->second, added};
  }

  std::int64_t block_;
  std::uint32_t next_ = 0;
  std::vector<std::pair<std::int64_t, std::int64_t>> parts_;  // name and tokens of the runs in a block
  std::unordered_map<std::int64_t, std::uint32_t> whole_;
  std::map<std::vector<std::pair<std::int64_t, std::int64_t>>, std::uint32_t> mixed_;
};

}  // namespace

DeltaPrompts expand_deltas(const DeltaTurns& turns, std::uint32_t block, std::int64_t most_tokens) {
  DeltaPrompts made;
  made.hash_offsets.push_back(0);
  DeltaBlocks blocks(block);
  std::vector<DeltaRun> runs;
  std::vector<std::uint32_t> whole;
  std::int64_t answers = 0;  // names of answers are below 0
  for (std::size_t session = 0; session + 1 < turns.session_offsets.size(); ++session) {
    const auto first = static_cast<std::size_t>(turns.session_offsets[session]);
    const auto last = static_cast<std::size_t>(turns.session_offsets[session + 1]);
    runs.clear();
    std::int64_t tokens = 0;
    for (std::size_t turn = first; turn < last; ++turn) {
      for (auto run = static_cast<std::size_t>(turns.run_offsets[turn]);
           run < static_cast<std::size_t>(turns.run_offsets[turn + 1]); ++run) {
        runs.push_back({turns.run_names[run], turns.run_tokens[run]});
        tokens += turns.run_tokens[run];
      }
      made.prompt_tokens.push_back(tokens);
      runs.push_back({--answers, turns.output_tokens[turn]});
      tokens += turns.output_tokens[turn];
      if (tokens > most_tokens) {
        made.too_long = static_cast<std::int64_t>(session);
        return made;
      }
    }
    whole.clear();
    // The session's last prompt has all others as prefixes, but for their last, partly filled blocks.
    if (first < last) blocks.append(runs, made.prompt_tokens[last - 1], whole);
    for (std::size_t turn = first; turn < last; ++turn) {
      const auto count = static_cast<std::ptrdiff_t>((made.prompt_tokens[turn] + block - 1) / block);
      made.hash_ids.insert(made.hash_ids.end(), whole.begin(), whole.begin() + count);
      made.hash_offsets.push_back(static_cast<std::int64_t>(made.hash_ids.size()));
    }
  }
  return made;
}

}  // namespace understudy
