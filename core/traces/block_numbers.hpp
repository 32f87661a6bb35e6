// Block ids of one trace as numbers that no other trace has.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace understudy {

// Ids of prompts as a trace gives them: a row has as many as the trace lists, which may be fewer or more than its
// prompt has blocks.
struct LocalBlocks {
  std::span<const std::int64_t> id_offsets;
  std::span<const std::uint64_t> ids;
  std::span<const std::int64_t> prompt_tokens;
  std::uint64_t block_size = 1;
};

// Number the blocks of the rows in this order from `first`, by first appearance: equal ids of whole blocks get equal
// numbers; a partly filled last block and blocks without an id belong to their row alone.
std::vector<std::uint64_t> number_blocks(const LocalBlocks& blocks, std::span<const std::int64_t> order,
                                         std::uint64_t first);

// Lists of ids, concatenated.
struct IdLists {
  std::vector<std::int64_t> counts;
  std::vector<std::uint64_t> ids;
};
// Add a JSON list such as `[1, 2]`; false, with `lists` in disorder, if the text is no list of integers of 64 bits.
bool read_id_list(std::string_view text, IdLists& lists);

}  // namespace understudy
