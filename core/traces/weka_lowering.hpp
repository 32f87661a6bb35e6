// From the requests of one Weka trace to a graph: which of them form a stream, and what each waits for.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace understudy {

enum class Trigger : std::uint8_t { Dispatch, Completion };
enum class Relation : std::uint8_t { Sequence, Spawn, Join, ReplayBarrier };

// Requests of a trace in the order of its file: a row each, those of sub-agents at the place of their marker.
struct WekaTrace {
  std::span<const std::int64_t> start_ns;
  std::span<const std::int64_t> end_ns;
  std::span<const std::int32_t> model;
  std::span<const std::int64_t> output_tokens;
  std::span<const std::int32_t> scope;        // 0: top level; 1, 2, …: the sub-agents in file order
  std::span<const std::int64_t> id_offsets;   // one more than rows
  std::span<const std::uint64_t> ids;         // block ids of the prompts
  std::span<const std::int64_t> owner;        // by sub-agent: the last top-level row before its marker, -1: none
  std::span<const std::int64_t> returned_ns;  // by sub-agent: when a blocking one returned, -1: when its last row ends,
                                              // -2: it runs in the background

  std::size_t size() const noexcept { return start_ns.size(); }
  std::span<const std::uint64_t> ids_of(std::size_t row) const {
    const auto first = static_cast<std::size_t>(id_offsets[row]);
    return ids.subspan(first, static_cast<std::size_t>(id_offsets[row + 1]) - first);
  }
};

struct GraphEdge {
  std::int64_t row = 0;  // the request that is waited for
  Trigger trigger = Trigger::Completion;
  std::int64_t delay_ns = 0;
  Relation relation = Relation::Sequence;
};

struct LoweredTrace {
  std::vector<std::int32_t> stream;           // by row: 0 is the main stream of its scope, then its workers by start
  std::vector<std::vector<GraphEdge>> edges;  // by row: what it waits for
  std::vector<std::int64_t> order;            // rows by start, those of a stream as they follow one another
  std::int64_t early_join = -1;               // a sub-agent that ends after the request that it returned to began
};

// The rules are those of docs/agents.md, as `tests/model/weka.py` writes them down.
LoweredTrace lower_weka(const WekaTrace& trace);

}  // namespace understudy
