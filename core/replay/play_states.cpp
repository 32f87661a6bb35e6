#include "replay/play_states.hpp"

#include <algorithm>
#include <limits>

#include "base/assert.hpp"

namespace understudy {

namespace {

constexpr std::int64_t kLatestArrival = std::numeric_limits<std::int64_t>::max() / 2;

std::int64_t later(std::int64_t time_ns, std::int64_t by_ns) {
  return by_ns > kLatestArrival - time_ns ? kLatestArrival : time_ns + by_ns;
}

// Offsets of groups from the sizes of the groups, which are counted at the place behind their own.
void sum_up(std::vector<std::size_t>& counts) {
  for (std::size_t i = 1; i < counts.size(); ++i) counts[i] += counts[i - 1];
}

}  // namespace

PlayStates::PlayStates(const GraphColumns& graph)
    : graph_(graph),
      first_dependent_(graph.play.size() + 1),
      waits_(graph.play.size()),
      earliest_ns_(graph.play.size()) {
  const std::size_t size = graph.play.size();
  for (const std::int32_t play : graph.play) {
    const auto place = static_cast<std::size_t>(play);
    if (place >= left_.size()) left_.resize(place + 1);
    ++left_[place];
  }
  first_row_.resize(left_.size() + 1);
  for (const std::int32_t play : graph.play) ++first_row_[static_cast<std::size_t>(play) + 1];
  sum_up(first_row_);
  rows_.resize(size);
  std::vector<std::size_t> next(first_row_.begin(), first_row_.end() - 1);
  for (std::uint64_t row = 0; row < size; ++row) rows_[next[play_of(row)]++] = row;

  const std::size_t edges = graph.dependency_rows.size();
  for (const std::int64_t on : graph.dependency_rows) ++first_dependent_[static_cast<std::size_t>(on) + 1];
  sum_up(first_dependent_);
  next.assign(first_dependent_.begin(), first_dependent_.end() - 1);
  dependents_.resize(edges);
  dependent_edge_.resize(edges);
  for (std::uint64_t row = 0; row < size; ++row) {
    const auto begin = static_cast<std::size_t>(graph.dependency_offsets[row]);
    const auto end = static_cast<std::size_t>(graph.dependency_offsets[row + 1]);
    waits_[row] = static_cast<std::uint32_t>(end - begin) + 1;  // and for the start of its play
    for (std::size_t edge = begin; edge < end; ++edge) {
      const std::size_t place = next[static_cast<std::size_t>(graph.dependency_rows[edge])]++;
      dependents_[place] = row;
      dependent_edge_[place] = edge;
    }
  }
}

std::span<const PlayStates::Released> PlayStates::start(std::size_t play, std::int64_t time_ns) {
  released_.clear();
  for (std::size_t place = first_row_[play]; place < first_row_[play + 1]; ++place) {
    const std::uint64_t row = rows_[place];
    earliest_ns_[row] = std::max(earliest_ns_[row], later(time_ns, graph_.not_before_ns[row]));
    release_if_free(row);
  }
  return released_;
}

std::span<const PlayStates::Released> PlayStates::on_event(std::uint64_t row, Event event, std::int64_t time_ns) {
  released_.clear();
  if (event == Event::Completion) {
    UNDERSTUDY_ASSERT(left_[play_of(row)] > 0, "a request ends once");
    --left_[play_of(row)];
  }
  for (std::size_t place = first_dependent_[row]; place < first_dependent_[row + 1]; ++place) {
    const std::size_t edge = dependent_edge_[place];
    if (graph_.dependency_triggers[edge] != static_cast<std::uint8_t>(event)) continue;
    const std::uint64_t waiting = dependents_[place];
    earliest_ns_[waiting] = std::max(earliest_ns_[waiting], later(time_ns, graph_.dependency_delay_ns[edge]));
    release_if_free(waiting);
  }
  return released_;
}

void PlayStates::bring_forward(std::size_t play, std::int64_t by_ns, std::int64_t now_ns) {
  for (std::size_t place = first_row_[play]; place < first_row_[play + 1]; ++place) {
    std::int64_t& earliest_ns = earliest_ns_[rows_[place]];
    if (waits_[rows_[place]] > 0 && earliest_ns > now_ns) earliest_ns = std::max(now_ns, earliest_ns - by_ns);
  }
}

void PlayStates::release_if_free(std::uint64_t row) {
  UNDERSTUDY_ASSERT(waits_[row] > 0, "a request is released once");
  if (--waits_[row] == 0) released_.push_back({row, earliest_ns_[row]});
}

}  // namespace understudy
