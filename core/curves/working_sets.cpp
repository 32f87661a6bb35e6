#include "curves/working_sets.hpp"

#include <algorithm>
#include <numeric>

#include "base/errors.hpp"
#include "curves/lru_curve.hpp"

namespace understudy {

PrefixRuns prefix_runs(const BlockVisits& visits, std::span<const std::int64_t> rows, std::uint64_t size) {
  constexpr std::uint32_t kNone = 0xFFFFFFFFu;
  const std::size_t distinct = visits.distinct();
  std::vector<std::uint32_t> requests(distinct);
  std::vector<std::uint32_t> parent(distinct, kNone);
  std::vector<std::uint32_t> below(distinct, 1);
  for (const std::int64_t row : rows) {
    const std::span<const std::uint32_t> blocks = visits.blocks_of(static_cast<std::size_t>(row));
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      ++requests[blocks[i]];
      if (i > 0) parent[blocks[i]] = blocks[i - 1];
    }
  }
  for (std::size_t block = distinct; block > 0; --block) {
    // A parent has the smaller number, so a block is complete before it is added to its parent.
    if (parent[block - 1] != kNone && requests[block - 1] > 0) below[parent[block - 1]] += below[block - 1];
  }
  const std::vector<std::uint32_t> recomputed = lru_recomputed(visits, rows, size);
  PrefixRuns out;
  std::vector<std::uint32_t> run_of(distinct, kNone);
  for (std::uint32_t block = 0; block < distinct; ++block) {
    if (requests[block] < 2) continue;
    const std::uint32_t before = parent[block];
    if (before != kNone && requests[before] == requests[block]) {
      run_of[block] = run_of[before];
      ++out.blocks[run_of[block]];
      out.recomputed[run_of[block]] += recomputed[block];
      continue;
    }
    run_of[block] = static_cast<std::uint32_t>(out.row.size());
    out.row.push_back(-1);
    out.position.push_back(0);
    out.blocks.push_back(1);
    out.requests.push_back(requests[block]);
    out.recomputed.push_back(recomputed[block]);
    out.below.push_back(below[block]);
  }
  for (const std::int64_t row : rows) {
    const std::span<const std::uint32_t> blocks = visits.blocks_of(static_cast<std::size_t>(row));
    for (std::size_t i = 0; i < blocks.size() && run_of[blocks[i]] != kNone; ++i) {
      if (out.row[run_of[blocks[i]]] >= 0) continue;
      out.row[run_of[blocks[i]]] = row;
      out.position[run_of[blocks[i]]] = static_cast<std::int64_t>(i);
    }
  }
  return out;
}

namespace {

// Returns the number of sessions. Throws InvalidArgument for another count of rows, or a negative session.
std::size_t count_sessions(const BlockVisits& visits, std::span<const std::int32_t> session) {
  if (session.size() != visits.rows()) {
    throw Error(ErrorKind::InvalidArgument, "session has ", session.size(), " rows, expected ", visits.rows());
  }
  const auto least = std::min_element(session.begin(), session.end());
  if (least != session.end() && *least < 0) {
    throw Error(ErrorKind::InvalidArgument, "session must not be negative, got ", *least);
  }
  return session.empty() ? 0 : static_cast<std::size_t>(*std::max_element(session.begin(), session.end())) + 1;
}

}  // namespace

SessionBlocks session_blocks(const BlockVisits& visits, std::span<const std::int32_t> session) {
  const std::size_t sessions = count_sessions(visits, session);
  std::vector<std::size_t> rows(session.size());
  std::iota(rows.begin(), rows.end(), std::size_t{0});
  std::stable_sort(rows.begin(), rows.end(), [&](std::size_t a, std::size_t b) { return session[a] < session[b]; });
  SessionBlocks out;
  out.distinct.assign(sessions, 0);
  out.own.assign(sessions, 0);
  constexpr std::int32_t kUnseen = -1;
  std::vector<std::int32_t> last(visits.distinct(), kUnseen);
  std::vector<bool> shared(visits.distinct());
  for (const std::size_t row : rows) {
    for (const std::uint32_t block : visits.blocks_of(row)) {
      if (last[block] == session[row]) continue;
      shared[block] = last[block] != kUnseen;
      last[block] = session[row];
      ++out.distinct[static_cast<std::size_t>(session[row])];
    }
  }
  for (std::size_t block = 0; block < last.size(); ++block) {
    if (last[block] != kUnseen && !shared[block]) ++out.own[static_cast<std::size_t>(last[block])];
  }
  return out;
}

std::int64_t most_open_blocks(const BlockVisits& visits, std::span<const std::int64_t> order,
                              std::span<const std::int32_t> session) {
  std::vector<std::vector<std::uint32_t>> begun(count_sessions(visits, session));  // rows of each open session
  std::vector<std::uint32_t> to_end(begun.size());
  for (const std::int64_t event : order) {
    const std::int64_t row = event < 0 ? ~event : event;
    visits.check_rows({&row, 1});
    to_end[static_cast<std::size_t>(session[static_cast<std::size_t>(row)])] += event < 0;
  }
  std::vector<std::uint32_t> holders(visits.distinct());  // visits of open sessions
  std::int64_t held = 0;
  std::int64_t most = 0;
  for (const std::int64_t event : order) {
    const auto row = static_cast<std::size_t>(event < 0 ? ~event : event);
    const auto own = static_cast<std::size_t>(session[row]);
    if (event >= 0) {
      for (const std::uint32_t block : visits.blocks_of(row)) held += holders[block]++ == 0;
      begun[own].push_back(static_cast<std::uint32_t>(row));
      most = std::max(most, held);
    } else if (--to_end[own] == 0) {
      for (const std::uint32_t each : begun[own]) {
        for (const std::uint32_t block : visits.blocks_of(each)) held -= --holders[block] == 0;
      }
      begun[own] = {};
    }
  }
  return most;
}

}  // namespace understudy
