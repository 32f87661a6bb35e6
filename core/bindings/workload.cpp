#include "workload.hpp"

#include "convert.hpp"

namespace understudy {

namespace {

// Offsets and links are followed without further checks, so they are checked here.
void check_links(const WorkloadColumns& w) {
  const auto rows = static_cast<std::int64_t>(w.size());
  for (std::size_t i = 0; i < w.size(); ++i) {
    if (w.prompt_tokens[i] < 1 || w.output_tokens[i] < 0 || w.delay_ns[i] < 0 || w.arrival_ns[i] < 0) {
      throw Error(ErrorKind::InvalidArgument, "row ", i,
                  ": prompt_tokens must be positive, and output_tokens, delay_ns and ", "arrival_ns not negative");
    }
    if (w.next_turn[i] >= rows || (w.next_turn[i] >= 0 && w.turn[static_cast<std::size_t>(w.next_turn[i])] == 0)) {
      throw Error(ErrorKind::InvalidArgument, "row ", i, ": next_turn ", w.next_turn[i], " is not a later turn");
    }
    const std::int64_t first = w.hash_offsets[i];
    const std::int64_t last = w.hash_offsets[i + 1];
    const std::int64_t ids = (w.prompt_tokens[i] + std::int64_t{w.trace_block_size} - 1) / w.trace_block_size;
    if (first < 0 || last < first || last > static_cast<std::int64_t>(w.hash_ids.size()) || last - first != ids) {
      throw Error(ErrorKind::InvalidArgument, "row ", i, ": ", ids, " hash_ids expected for ", w.prompt_tokens[i],
                  " prompt tokens, got ", last - first);
    }
    if (!w.output_token_offsets.empty()) {
      const std::int64_t begin = w.output_token_offsets[i];
      const std::int64_t end = w.output_token_offsets[i + 1];
      if (begin < 0 || end < begin || end > static_cast<std::int64_t>(w.output_token_ids.size()) ||
          (end > begin && end - begin != w.output_tokens[i])) {
        throw Error(ErrorKind::InvalidArgument, "row ", i, ": ", w.output_tokens[i],
                    " output_token_ids or none expected, got ", end - begin);
      }
    }
    if (w.output_in_next.empty() || !w.output_in_next[i]) continue;
    if (w.next_turn[i] < 0 ||
        w.prompt_tokens[static_cast<std::size_t>(w.next_turn[i])] < w.prompt_tokens[i] + w.output_tokens[i]) {
      throw Error(ErrorKind::InvalidArgument, "row ", i, ": the next turn does not contain this turn's output");
    }
  }
}

void check_offsets(std::span<const std::int64_t> offsets, std::size_t end, const char* name) {
  for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
    if (offsets[i] < 0 || offsets[i + 1] < offsets[i] || offsets[i + 1] > static_cast<std::int64_t>(end)) {
      throw Error(ErrorKind::InvalidArgument, name, "[", i + 1, "] is ", offsets[i + 1], ", expected ", offsets[i],
                  " to ", end);
    }
  }
}

// Reads what requests wait for; the rows of dependencies are followed without further checks.
void read_graph(ColumnReader& from, nb::handle graph, std::size_t rows, GraphColumns& g) {
  from.read_of(graph, "play", g.play, rows);
  from.read_of(graph, "not_before_ns", g.not_before_ns, rows);
  from.read_of(graph, "dependency_offsets", g.dependency_offsets, rows + 1);
  from.read_of(graph, "dependency_rows", g.dependency_rows);
  const std::size_t edges = g.dependency_rows.size();
  from.read_of(graph, "dependency_triggers", g.dependency_triggers, edges);
  from.read_of(graph, "dependency_delay_ns", g.dependency_delay_ns, edges);
  from.read_of(graph, "dependency_relations", g.dependency_relations, edges);
  check_offsets(g.dependency_offsets, edges, "dependency_offsets");
  if (g.dependency_offsets.back() != static_cast<std::int64_t>(edges) || g.dependency_offsets.front() != 0) {
    throw Error(ErrorKind::InvalidArgument, "dependency_offsets must begin at 0 and end at ", edges);
  }
  for (std::size_t i = 0; i < rows; ++i) {
    if (g.play[i] < 0 || static_cast<std::size_t>(g.play[i]) >= rows || g.not_before_ns[i] < 0) {
      throw Error(ErrorKind::InvalidArgument, "row ", i, ": play and not_before_ns must not be negative");
    }
  }
  for (std::size_t i = 0; i < edges; ++i) {
    if (g.dependency_rows[i] < 0 || g.dependency_rows[i] >= static_cast<std::int64_t>(rows) ||
        g.dependency_delay_ns[i] < 0 || g.dependency_triggers[i] > 1) {
      throw Error(ErrorKind::InvalidArgument, "dependency ", i, ": row ", g.dependency_rows[i], ", trigger ",
                  unsigned{g.dependency_triggers[i]}, " or delay ", g.dependency_delay_ns[i], " is out of range");
    }
  }
}

}  // namespace

// A new column of the workload is a line here, and a field there.
WorkloadColumns read_workload(ColumnReader& from, nb::handle workload) {
  WorkloadColumns w;
  from.read("prompt_tokens", w.prompt_tokens);
  const std::size_t rows = w.size();
  from.read("arrival_ns", w.arrival_ns, rows);
  from.read("output_tokens", w.output_tokens, rows);
  from.read("priority", w.priority, rows);
  from.read("turn", w.turn, rows);
  from.read("next_turn", w.next_turn, rows);
  from.read("delay_ns", w.delay_ns, rows);
  from.read("hash_offsets", w.hash_offsets, rows + 1);
  from.read("hash_ids", w.hash_ids);
  from.read_if_there("max_tokens", w.max_tokens, rows);
  from.read_if_there("adapter", w.adapter, rows);
  from.read_if_there("strict_priority", w.strict_priority, rows);
  from.read_if_there("queue_order", w.queue_order, rows);
  from.read_if_there("abort_after_ns", w.abort_after_ns, rows);
  from.read_if_there("output_in_next", w.output_in_next, rows);
  from.read_if_there("output_token_offsets", w.output_token_offsets, rows + 1);
  from.read_if_there("output_token_ids", w.output_token_ids);
  from.read_if_there("accepted_draft_offsets", w.accepted_draft_offsets, rows + 1);
  from.read_if_there("accepted_drafts", w.accepted_drafts);
  const std::uint64_t block_size = read_uint(workload.attr("trace_block_size"), "trace_block_size", 1u << 30);
  if (block_size == 0) throw Error(ErrorKind::InvalidArgument, "trace_block_size must be at least 1");
  w.trace_block_size = static_cast<std::uint32_t>(block_size);
  const nb::object graph = nb::getattr(workload, "graph", nb::none());
  if (!graph.is_none()) read_graph(from, graph, rows, w.graph);
  check_links(w);
  check_offsets(w.accepted_draft_offsets, w.accepted_drafts.size(), "accepted_draft_offsets");
  return w;
}

}  // namespace understudy
