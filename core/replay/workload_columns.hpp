// A workload as a run reads it: columns, one row a request.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "replay/play_states.hpp"

namespace understudy {

// Columns of a workload, one row per request; the arrays outlive the run. Row order breaks ties. `next_turn` is -1 for
// the last turn of a session.
struct WorkloadColumns {
  std::span<const std::int64_t> arrival_ns;
  std::span<const std::int32_t> prompt_tokens;
  std::span<const std::int32_t> output_tokens;
  std::span<const std::int32_t> max_tokens;  // limits of the output, -1 for none; empty: no limits
  std::span<const std::int32_t> priority;
  std::span<const std::int32_t> adapter;          // LoRA adapter from 0, -1 for none; empty: no adapters
  std::span<const std::int64_t> strict_priority;  // for a router's queue; empty: all equal
  std::span<const std::int32_t> turn;
  std::span<const std::int64_t> next_turn;
  std::span<const std::int64_t> delay_ns;  // from the end of the previous turn to this one
  std::span<const std::int64_t> hash_offsets;
  std::span<const std::uint32_t> hash_ids;
  std::span<const bool> output_in_next;                // empty: nowhere
  std::span<const std::int64_t> output_token_offsets;  // empty: no row has exact outputs
  std::span<const std::uint32_t> output_token_ids;
  std::span<const std::int64_t> accepted_draft_offsets;  // empty: no row gives its accepted drafts
  std::span<const std::uint32_t> accepted_drafts;
  std::uint32_t trace_block_size = 512;
  std::span<const std::int64_t> abort_after_ns;  // from its arrival until the client aborts, -1: never; empty: none
  std::span<const std::int64_t> queue_order;     // orders equal priorities; empty: by arrival
  GraphColumns graph;                            // empty: turns of sessions wait for the one before
  std::span<const std::string> names;            // empty: row numbers

  std::size_t size() const noexcept { return prompt_tokens.size(); }
  // The limit of a row that has one, else its length.
  std::uint32_t limit(std::size_t row) const noexcept {
    const std::int32_t own = max_tokens.empty() ? -1 : max_tokens[row];
    return static_cast<std::uint32_t>(own < 0 || output_tokens[row] == 0 ? output_tokens[row] : own);
  }
};

}  // namespace understudy
