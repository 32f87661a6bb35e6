// Working sets of a workload: blocks below each shared prefix, and blocks of each session.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "curves/block_visits.hpp"

namespace understudy {

// Prefixes that at least two requests read, as runs of blocks that the same requests visit; one element per run.
struct PrefixRuns {
  std::vector<std::int64_t> row;         // first row with the run
  std::vector<std::int64_t> position;    // of its first block in the prompt
  std::vector<std::int64_t> blocks;      // length
  std::vector<std::int64_t> requests;    // visits of each of its blocks
  std::vector<std::int64_t> recomputed;  // block computations that an LRU cache of the given size repeats
  std::vector<std::int64_t> below;       // distinct blocks of all requests with this prefix, from the run on
};

PrefixRuns prefix_runs(const BlockVisits& visits, std::span<const std::int64_t> rows, std::uint64_t size);

struct SessionBlocks {
  std::vector<std::int64_t> distinct;  // blocks that the session visits
  std::vector<std::int64_t> own;       // those that no other session visits
};

// `session` numbers each row's session from 0. Throws InvalidArgument for a negative number.
SessionBlocks session_blocks(const BlockVisits& visits, std::span<const std::int32_t> session);

// The most distinct blocks that open sessions have visited at one time. A session is open from the first begin to the
// last end of its rows; `order` has row r where it begins and ~r where it ends. Throws InvalidArgument as
// session_blocks does.
std::int64_t most_open_blocks(const BlockVisits& visits, std::span<const std::int64_t> order,
                              std::span<const std::int32_t> session);

}  // namespace understudy
