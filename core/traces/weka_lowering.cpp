#include "traces/weka_lowering.hpp"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <tuple>
#include <unordered_set>
#include <utility>

namespace understudy {

namespace {

using TraceRow = std::int64_t;
using TraceRows = std::vector<TraceRow>;

constexpr TraceRow kNoTraceRow = -1;
constexpr std::int64_t kMicrosecond = 1'000;
constexpr std::int64_t kHour = 3'600'000'000'000;
constexpr std::int64_t kPreambleOutput = 64;

// Requests that follow one another, and the one that the first of them forked from.
struct WekaChain {
  TraceRows rows;
  TraceRow tail = kNoTraceRow;  // the last row with ids, else the last row
  TraceRow fork = kNoTraceRow;
  std::size_t common = 0;  // leading blocks shared with the fork
};

class WekaLowering {
 public:
  explicit WekaLowering(const WekaTrace& trace) : trace_(trace) {
    out_.stream.resize(trace.size());
    out_.edges.resize(trace.size());
  }

  LoweredTrace run() {
    std::vector<TraceRows> scopes(trace_.owner.size() + 1);
    for (std::size_t row = 0; row < trace_.size(); ++row) {
      scopes[static_cast<std::size_t>(trace_.scope[row])].push_back(static_cast<TraceRow>(row));
    }
    std::vector<std::vector<TraceRows>> streams;
    for (TraceRows& rows : scopes) {
      std::ranges::sort(rows, {}, [this](TraceRow row) { return order_of(row); });
      streams.push_back(lower_scope(rows));
    }
    for (std::size_t agent = 0; agent < trace_.owner.size(); ++agent) attach(agent, streams[0], streams[agent + 1]);
    if (!streams[0].empty()) start_the_rest(streams);
    make_order(streams);
    return std::move(out_);
  }

 private:
  static std::size_t at(TraceRow row) { return static_cast<std::size_t>(row); }
  std::int64_t start(TraceRow row) const { return trace_.start_ns[at(row)]; }
  std::int64_t end(TraceRow row) const { return trace_.end_ns[at(row)]; }
  std::int32_t model(TraceRow row) const { return trace_.model[at(row)]; }
  std::span<const std::uint64_t> ids(TraceRow row) const { return trace_.ids_of(at(row)); }
  std::pair<std::int64_t, TraceRow> order_of(TraceRow row) const { return {start(row), row}; }

  std::size_t common_prefix(TraceRow one, TraceRow other) const {
    const auto left = ids(one);
    const auto right = ids(other);
    const auto parted = std::ranges::mismatch(left, right);
    return static_cast<std::size_t>(std::distance(left.begin(), parted.in1));
  }

  // One edge for a request, a trigger and a relation: the first.
  void depend(TraceRow row, TraceRow on, Trigger trigger, std::int64_t delay_ns, Relation relation) {
    std::vector<GraphEdge>& edges = out_.edges[at(row)];
    const bool known = std::ranges::any_of(edges, [&](const GraphEdge& edge) {
      return edge.row == on && edge.trigger == trigger && edge.relation == relation;
    });
    if (!known) edges.push_back({on, trigger, std::max<std::int64_t>(0, delay_ns), relation});
  }

  void spawn(TraceRow row, TraceRow fork) {
    if (start(row) < end(fork)) {
      depend(row, fork, Trigger::Dispatch, start(row) - start(fork), Relation::Spawn);
    } else {
      depend(row, fork, Trigger::Completion, start(row) - end(fork), Relation::Spawn);
    }
  }

  // Streams of the requests of one scope, the main one first, linked among themselves.
  std::vector<TraceRows> lower_scope(const TraceRows& ordered) {
    std::vector<TraceRows> streams;
    if (ordered.empty()) return streams;
    const bool has_preamble = is_preamble(ordered);
    std::vector<WekaChain> chains = make_chains(std::span(ordered).subspan(has_preamble ? 1 : 0));
    close_seams(chains);
    std::ranges::sort(chains, {}, [this](const WekaChain& chain) { return order_of(chain.rows.front()); });
    if (has_preamble && chains.empty()) chains.emplace_back();
    if (has_preamble) chains[0].rows.insert(chains[0].rows.begin(), ordered[0]);
    for (std::size_t place = 0; place < chains.size(); ++place) {
      TraceRows& rows = chains[place].rows;
      for (const TraceRow row : rows) out_.stream[at(row)] = static_cast<std::int32_t>(place);
      for (std::size_t i = 1; i < rows.size(); ++i) {
        depend(rows[i], rows[i - 1], Trigger::Completion, start(rows[i]) - end(rows[i - 1]), Relation::Sequence);
      }
      if (chains[place].fork != kNoTraceRow && place > 0) spawn(rows.front(), chains[place].fork);
      streams.push_back(std::move(rows));
    }
    add_barriers(ordered, streams);
    return streams;
  }

  // Whether the first request is a short call before the session proper, such as the one that names it.
  bool is_preamble(const TraceRows& ordered) const {
    const auto first = ids(ordered[0]);
    if (first.empty()) return false;
    const std::unordered_set<std::uint64_t> own(first.begin(), first.end());
    bool shares = false;
    for (std::size_t i = 1; i < ordered.size(); ++i) {
      const auto other = ids(ordered[i]);
      if (other.empty()) continue;
      if (other.front() == first.front()) return false;
      shares = shares || std::ranges::any_of(other, [&](std::uint64_t id) { return own.contains(id); });
    }
    return !shares || trace_.output_tokens[at(ordered[0])] <= kPreambleOutput;
  }

  std::vector<WekaChain> make_chains(std::span<const TraceRow> ordered) const {
    std::vector<WekaChain> chains;
    bool any_ids = false;
    for (const TraceRow row : ordered) {
      const bool has_ids = !ids(row).empty();
      if (chains.empty()) {
        chains.push_back({{row}, row, kNoTraceRow, 0});
      } else if (!has_ids || !any_ids) {
        chains[0].rows.push_back(row);
        if (has_ids || ids(chains[0].tail).empty()) chains[0].tail = row;
      } else {
        extend_or_fork(chains, row);
      }
      any_ids = any_ids || has_ids;
    }
    return chains;
  }

  void extend_or_fork(std::vector<WekaChain>& chains, TraceRow row) const {
    WekaChain* longest = nullptr;
    const WekaChain* nearest = nullptr;
    std::pair<std::size_t, std::size_t> best{0, 0};
    for (WekaChain& chain : chains) {
      const std::size_t length = ids(chain.tail).size();
      const std::size_t common = common_prefix(chain.tail, row);
      if (common == length && model(chain.tail) == model(row) && end(chain.tail) <= start(row) + kMicrosecond &&
          (longest == nullptr || length > ids(longest->tail).size())) {
        longest = &chain;
      }
      if (nearest == nullptr || std::pair(common, length) > best) {
        nearest = &chain;
        best = {common, length};
      }
    }
    if (longest != nullptr) {
      longest->rows.push_back(row);
      longest->tail = row;
      return;
    }
    const TraceRow fork = best.first > 0 ? nearest->tail : kNoTraceRow;
    chains.push_back({{row}, row, fork, best.first});
  }

  // Append to each chain the one that carries it on after a cut of its context.
  void close_seams(std::vector<WekaChain>& chains) const {
    std::vector<bool> done(trace_.size());
    while (true) {
      TraceRow tail = kNoTraceRow;  // the next fork in file order
      for (const WekaChain& chain : chains) {
        if (chain.fork != kNoTraceRow && !done[at(chain.fork)] && (tail == kNoTraceRow || chain.fork < tail))
          tail = chain.fork;
      }
      if (tail == kNoTraceRow) return;
      done[at(tail)] = true;
      const auto own = std::ranges::find(chains, tail, &WekaChain::tail);
      if (own == chains.end()) continue;
      const auto taken = find_seam(chains, tail);
      if (taken == chains.end()) continue;
      own->rows.insert(own->rows.end(), taken->rows.begin(), taken->rows.end());
      // Requests without ids may follow the tail, and begin later.
      std::ranges::sort(own->rows, {}, [this](TraceRow row) { return order_of(row); });
      own->tail = taken->tail;
      move_siblings(chains, tail, *taken, own->tail);
      chains.erase(taken);
    }
  }

  std::vector<WekaChain>::iterator find_seam(std::vector<WekaChain>& chains, TraceRow tail) const {
    auto best = chains.end();
    const auto rank = [this](const WekaChain& chain) {
      return std::tuple(-static_cast<std::int64_t>(chain.common), start(chain.rows.front()));
    };
    for (auto chain = chains.begin(); chain != chains.end(); ++chain) {
      const TraceRow first = chain->rows.front();
      if (chain->fork != tail || start(first) < end(tail) - kMicrosecond || model(first) != model(tail)) continue;
      const bool forgets = 2 * chain->common < ids(tail).size();
      if (start(first) - end(tail) > kHour && forgets) continue;
      if (best == chains.end() || rank(*chain) < rank(*best)) best = chain;
    }
    return best;
  }

  // Chains that forked from the old tail and begin after the new one fork from the new one, if they share blocks.
  void move_siblings(std::vector<WekaChain>& chains, TraceRow from, const WekaChain& taken, TraceRow to) const {
    for (WekaChain& chain : chains) {
      if (&chain == &taken || chain.fork != from || start(chain.rows.front()) < start(to)) continue;
      const std::size_t common = common_prefix(to, chain.rows.front());
      if (common == 0) continue;
      chain.fork = to;
      chain.common = common;
    }
  }

  // A request also waits for what had ended in other streams when it began: a replay that is slow keeps that order.
  void add_barriers(const TraceRows& ordered, const std::vector<TraceRows>& streams) {
    if (streams.size() < 2) return;
    TraceRows found;
    for (const TraceRow row : ordered) {
      found.clear();
      for (std::size_t place = 0; place < streams.size(); ++place) {
        if (static_cast<std::int32_t>(place) == out_.stream[at(row)]) continue;
        TraceRow last = kNoTraceRow;
        for (const TraceRow other : streams[place]) {
          if (start(other) >= start(row) || end(other) > start(row) + kMicrosecond) continue;
          if (last == kNoTraceRow || std::tuple(end(other), order_of(other)) > std::tuple(end(last), order_of(last))) {
            last = other;
          }
        }
        if (last != kNoTraceRow) found.push_back(last);
      }
      for (const TraceRow one : found) {
        const bool implied =
            std::ranges::any_of(found, [&](TraceRow other) { return other != one && end(one) <= start(other); });
        if (!implied) depend(row, one, Trigger::Completion, 0, Relation::ReplayBarrier);
      }
    }
  }

  // The first stream of a sub-agent starts from its owner; a later request of the owner waits for a blocking one.
  void attach(std::size_t agent, const std::vector<TraceRows>& top, const std::vector<TraceRows>& streams) {
    const TraceRow owner = trace_.owner[agent];
    if (streams.empty() || owner == kNoTraceRow) return;
    spawn(streams[0].front(), owner);
    std::int64_t until = trace_.returned_ns[agent];
    if (until == -2) return;
    for (const TraceRows& rows : streams) {
      if (trace_.returned_ns[agent] == -1) until = std::max(until, end(rows.back()));
    }
    const TraceRows& own = top[static_cast<std::size_t>(out_.stream[at(owner)])];
    auto target = std::next(std::ranges::find(own, owner));
    while (target != own.end() && start(*target) + kMicrosecond < until) ++target;
    if (target == own.end()) return;
    for (const TraceRows& rows : streams) {
      const std::int64_t delay_ns = start(*target) - end(rows.back());
      if (delay_ns < -kMicrosecond && out_.early_join < 0) out_.early_join = static_cast<std::int64_t>(agent);
      depend(*target, rows.back(), Trigger::Completion, delay_ns, Relation::Join);
    }
  }

  // Streams that nothing started begin as long after the first request as they did.
  void start_the_rest(const std::vector<std::vector<TraceRows>>& scopes) {
    const TraceRow first = scopes[0][0].front();
    for (const std::vector<TraceRows>& streams : scopes) {
      for (const TraceRows& rows : streams) {
        const TraceRow row = rows.front();
        if (row == first || !out_.edges[at(row)].empty()) continue;
        depend(row, first, Trigger::Dispatch, start(row) - start(first), Relation::Spawn);
      }
    }
  }

  void make_order(const std::vector<std::vector<TraceRows>>& scopes) {
    TraceRows by_start(trace_.size());
    for (std::size_t row = 0; row < by_start.size(); ++row) by_start[row] = static_cast<TraceRow>(row);
    std::ranges::sort(by_start, {}, [this](TraceRow row) { return order_of(row); });
    std::vector<std::vector<std::size_t>> next(scopes.size());
    for (std::size_t scope = 0; scope < scopes.size(); ++scope) next[scope].resize(scopes[scope].size());
    for (const TraceRow row : by_start) {
      const auto scope = static_cast<std::size_t>(trace_.scope[at(row)]);
      const auto stream = static_cast<std::size_t>(out_.stream[at(row)]);
      out_.order.push_back(scopes[scope][stream][next[scope][stream]++]);
    }
  }

  const WekaTrace& trace_;
  LoweredTrace out_;
};

}  // namespace

LoweredTrace lower_weka(const WekaTrace& trace) { return WekaLowering(trace).run(); }

}  // namespace understudy
