// Which blocks of a prompt are cached, group by group: also those behind blocks that are not.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/vllm/kv/block_pool.hpp"

namespace understudy {

// Valid until the next change of the pool. Positions are blocks from the prompt's first.
class PrefixCover {
 public:
  // `pool` outlives it.
  PrefixCover(const BlockPool& pool, std::size_t num_groups) : pool_(pool), covers_(num_groups) {}

  // Looks the names up; the others ask about those.
  void look_up(std::span<const BlockName> names);
  // The longest prefix of which all these groups have each block.
  std::uint32_t prefix(std::span<const std::size_t> groups, std::uint32_t limit);
  // The last position up to which all these groups have `need` blocks; else the longest prefix.
  std::uint32_t last_window(std::span<const std::size_t> groups, std::uint32_t limit, std::uint32_t need);
  // Parts of runs with the positions [first, end) of a group.
  void clip(std::size_t group, std::uint32_t first, std::uint32_t end, std::vector<BlockPool::Piece>& out);

 private:
  struct Step {  // of the path through the tree
    const PrefixNode* node;
    std::uint32_t position;
    std::uint32_t names;
  };
  struct Part {
    BlockRun* run;
    std::uint32_t first;  // position
    std::uint32_t end;
    std::uint32_t offset;  // of the first, in the run
  };
  struct Cover {
    bool known = false;
    std::vector<Part> parts;  // by position; of several copies the earliest registered
  };

  const std::vector<Part>& parts(std::size_t group);
  static void add_layers(const Step& step, std::size_t group, std::vector<Part>& out);

  const BlockPool& pool_;
  std::vector<Step> path_;
  std::vector<Cover> covers_;  // by group
};

}  // namespace understudy
