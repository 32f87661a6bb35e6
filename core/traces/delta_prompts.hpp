// Prompts of sessions whose turns list only what is new: each is all before it, answers included, and the new part.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace understudy {

// Turns, session by session. A turn's new part is runs of equal tokens; runs of one name have equal tokens.
struct DeltaTurns {
  std::span<const std::int64_t> session_offsets;  // offsets into the turns, one more than sessions
  std::span<const std::int64_t> run_offsets;      // by turn, and one more: offsets into the runs
  std::span<const std::int64_t> run_names;        // at least 0
  std::span<const std::int64_t> run_tokens;
  std::span<const std::int64_t> output_tokens;  // by turn; no two answers share tokens
};

struct DeltaPrompts {
  std::vector<std::int64_t> prompt_tokens;  // by turn
  std::vector<std::int64_t> hash_offsets;   // one more than turns
  std::vector<std::uint32_t> hash_ids;      // one per `block` tokens, numbered by first appearance
  std::int64_t too_long = -1;               // the first session of more than `most_tokens`, with nothing else made
};

DeltaPrompts expand_deltas(const DeltaTurns& turns, std::uint32_t block, std::int64_t most_tokens);

}  // namespace understudy
