#include "links/link_flow.hpp"

#include <algorithm>
#include <bit>
#include <limits>

#include "base/errors.hpp"

namespace understudy {

namespace {

using Wide = LinkFlow::Wide;

constexpr LinkFlow::Tick kWhole = LinkFlow::Tick{1} << LinkFlow::kTickBits;
constexpr Wide kUnitsPerByte = Wide{1'000'000'000} << LinkFlow::kTickBits;

// Units that each of the lane's members gets in a tick.
double rate_of(std::uint64_t bytes_per_second, std::uint64_t sharers) {
  return static_cast<double>(bytes_per_second) / static_cast<double>(sharers);
}

[[noreturn]] void broken(const char* what) { throw Error(ErrorKind::InvariantViolated, "links: ", what); }

}  // namespace

LinkFlow::PortId LinkFlow::add_port(std::uint64_t bytes_per_second, bool demand_first) {
  Port port;
  port.bytes_per_second = bytes_per_second;
  port.demand_first = demand_first;
  ports_.push_back(std::move(port));
  return static_cast<PortId>(ports_.size() - 1);
}

LinkFlow::LaneId LinkFlow::lane(std::span<const std::uint32_t> links, std::span<const PortId> ports,
                                Priority priority) {
  for (const LaneId id : ports_[ports.front()].lanes) {
    const Lane& known = lanes_[id];
    if (known.priority == priority && std::ranges::equal(links, std::span(known.links).first(known.num_links)))
      return id;
  }
  Lane lane;
  lane.priority = priority;
  lane.num_links = static_cast<std::uint32_t>(links.size());
  std::ranges::copy(links, lane.links.begin());
  const LaneId id = static_cast<LaneId>(lanes_.size());
  for (const PortId port : ports) {
    lane.ports[lane.num_ports++] = port;
    const std::uint64_t limit = ports_[port].bytes_per_second;
    if (limit > 0 && (lane.least_port == 0 || limit < lane.least_port)) lane.least_port = limit;
    ports_[port].lanes.push_back(id);
  }
  lanes_.push_back(std::move(lane));
  return id;
}

void LinkFlow::start(std::int64_t now_ns, std::int64_t flow_ns, LaneId lane, TransferId id, std::uint64_t bytes,
                     std::vector<Completion>& ended, Listener* listener) {
  if (flow_ns > now_ns) {
    waiting_.insert({flow_ns, id, lane, bytes});
  } else {
    join(lane, tick_of(flow_ns), id, bytes, ended, listener);
  }
}

void LinkFlow::run_until(std::int64_t now_ns, std::vector<Completion>& ended, Listener* listener) {
  run_until_tick(tick_of(now_ns), ended, listener);
}

void LinkFlow::run_dry(std::vector<Completion>& ended) {
  run_until_tick(tick_of(std::numeric_limits<std::int64_t>::max()), ended, nullptr);
}

void LinkFlow::run_until_tick(Tick end, std::vector<Completion>& ended, Listener* listener) {
  while (true) {
    const bool any_waits = !waiting_.empty();
    const Tick flows = any_waits ? tick_of(waiting_.begin()->flow_ns) : 0;
    if (!wakes_.empty() && (!any_waits || wakes_.top().tick <= flows)) {
      const Wake wake = wakes_.top();
      if (wake.tick > end) return;
      leave(wake.lane, wake.tick, ended, listener);
    } else {
      if (!any_waits || flows > end) return;
      const Waiting next = *waiting_.begin();
      waiting_.erase(waiting_.begin());
      join(next.lane, flows, next.id, next.bytes, ended, listener);
    }
  }
}

std::optional<LinkFlow::Next> LinkFlow::next() const {
  if (wakes_.empty() && waiting_.empty()) return std::nullopt;
  if (wakes_.empty()) return Next{waiting_.begin()->flow_ns, false};
  const std::int64_t end = ns_after(wakes_.top().tick);
  if (!waiting_.empty() && tick_of(waiting_.begin()->flow_ns) < wakes_.top().tick)
    return Next{waiting_.begin()->flow_ns, false};
  return Next{end, true};
}

void LinkFlow::join(LaneId id, Tick now, TransferId transfer, std::uint64_t bytes, std::vector<Completion>& ended,
                    Listener* listener) {
  ++operations_;
  Lane& lane = lanes_[id];
  if (lane.least_port == 0 || bytes == 0) {
    ended.push_back({ns_after(now), transfer});
    if (listener != nullptr) listener->ended(lane, ns_after(now), bytes);
    return;
  }
  settle(lane, now, listener);
  lane.members.push({lane.served + bytes * kUnitsPerByte, transfer, bytes, lane.lag});
  for (std::uint32_t i = 0; i < lane.num_ports; ++i) {
    Port& port = ports_[lane.ports[i]];
    if (port.flowing[0] + port.flowing[1] == 0) port.busy_since = now;
    ++port.flowing[static_cast<std::size_t>(lane.priority)];
  }
  reshare(id, now, 0, listener);
}

// The first member ends, and with it those that end at the same count.
void LinkFlow::leave(LaneId id, Tick now, std::vector<Completion>& ended, Listener* listener) {
  Lane& lane = lanes_[id];
  settle(lane, now, listener);
  lane.served = std::max(lane.served, lane.members.top().ends_at);  // rounding must not keep it here
  while (!lane.members.empty() && lane.members.top().ends_at <= lane.served) {
    ++operations_;
    const Member& member = lane.members.top();
    ended.push_back({ns_after(now), member.id});
    if (listener != nullptr) listener->ended(lane, ns_after(now), member.bytes);
    lane.members.pop();
    for (std::uint32_t i = 0; i < lane.num_ports; ++i) {
      Port& port = ports_[lane.ports[i]];
      if (--port.flowing[static_cast<std::size_t>(lane.priority)] == 0 && port.flowing[0] + port.flowing[1] == 0)
        port.busy_ticks += now - port.busy_since;
    }
  }
  if (lane.members.empty()) {  // keeps the numbers small
    lane.served = 0;
    lane.lag = 0;
  }
  reshare(id, now, lane.late_ticks, listener);
}

LinkFlow::Wide LinkFlow::moving(const Lane& lane, Tick now) {
  if (lane.members.empty() || lane.bytes_per_second == 0) return 0;
  const Wide all = (now - lane.settled_at) * lane.bytes_per_second;
  // Dividing 128 bits is slow, and sharers are most often one, two or four.
  return std::has_single_bit(lane.sharers) ? all >> std::countr_zero(lane.sharers) : all / lane.sharers;
}

void LinkFlow::settle(Lane& lane, Tick now, Listener* listener) {
  const Wide served = moving(lane, now);
  if (served > 0 && listener != nullptr) listener->moved(lane, lane.settled_at, now, served * lane.members.size());
  if (served > 0 && served * lane.sharers != (now - lane.settled_at) * lane.bytes_per_second) lane.lag += 1;
  lane.served += served;
  lane.settled_at = now;
}

// After a lane gained or lost members: new shares for every lane that has a port in common with it. `late_ticks`: how
// long they may have been due.
void LinkFlow::reshare(LaneId changed, Tick now, double late_ticks, Listener* listener) {
  for (std::uint32_t i = 0; i < lanes_[changed].num_ports; ++i) {
    for (const LaneId id : ports_[lanes_[changed].ports[i]].lanes) {
      Lane& lane = lanes_[id];
      if (lane.members.empty()) continue;
      ++operations_;
      const auto [bytes_per_second, sharers] = share(lane);
      if (bytes_per_second == lane.bytes_per_second && sharers == lane.sharers) continue;
      settle(lane, now, listener);
      const double gained = rate_of(bytes_per_second, sharers) - rate_of(lane.bytes_per_second, lane.sharers);
      lane.lag += late_ticks * std::max(gained, 0.0);
      lane.bytes_per_second = bytes_per_second;
      lane.sharers = sharers;
      if (id != changed) set_wake(id);
    }
  }
  set_wake(changed);
  forget_old_wakes();
}

// The least of the lane's fair shares, as a bandwidth over a number of sharers. Of a port that serves demand first,
// background gets nothing while there is demand.
std::pair<std::uint64_t, std::uint64_t> LinkFlow::share(const Lane& lane) const {
  std::uint64_t least = 0;
  std::uint64_t sharers = 1;
  for (std::uint32_t i = 0; i < lane.num_ports; ++i) {
    const Port& port = ports_[lane.ports[i]];
    if (port.bytes_per_second == 0) continue;  // room for everybody
    const auto [demand, background] = port.flowing;
    std::uint64_t among = demand + background;
    if (port.demand_first && demand > 0) {
      if (lane.priority == Priority::Background) return {0, 1};
      among = demand;
    }
    if (least == 0 || Wide{port.bytes_per_second} * sharers < Wide{least} * among) {
      least = port.bytes_per_second;
      sharers = among;
    }
  }
  return {least, sharers};
}

// Rounded up. Most transfers have one of a few sizes, and dividing 128 bits is slow.
LinkFlow::Tick LinkFlow::ticks_for(Wide units, std::uint64_t bytes_per_second) {
  Quotient& known = quotients_[static_cast<std::uint64_t>(units >> kTickBits) * 0x9E3779B97F4A7C15u >> 60];
  if (known.units != units || known.bytes_per_second != bytes_per_second) {
    known = {units, bytes_per_second, (units + bytes_per_second - 1) / bytes_per_second};
  }
  return known.ticks;
}

void LinkFlow::set_wake(LaneId id) {
  Lane& lane = lanes_[id];
  std::optional<Tick> wake;
  if (!lane.members.empty() && lane.bytes_per_second > 0) {
    const Member& first = lane.members.top();
    const Wide left = first.ends_at > lane.served ? (first.ends_at - lane.served) * lane.sharers : 0;
    wake = lane.settled_at + ticks_for(left, lane.bytes_per_second);
    lane.late_ticks = (lane.lag - first.lag) / rate_of(lane.bytes_per_second, lane.sharers) + 1;
    const Tick past = *wake & (kWhole - 1);
    const auto past_ticks = static_cast<double>(static_cast<std::uint64_t>(past));
    if (past_ticks <= lane.late_ticks && *wake - past >= lane.settled_at) {
      *wake -= past;
      lane.late_ticks -= past_ticks;
    }
  }
  if (wake == lane.wake) return;
  ++operations_;
  lane.wake = wake;
  if (wake) wakes_.push({*wake, id});
}

void LinkFlow::forget_old_wakes() {
  while (!wakes_.empty() && lanes_[wakes_.top().lane].wake != wakes_.top().tick) wakes_.pop();
  if (wakes_.size() <= max_wakes()) return;
  std::vector<Wake> kept;
  for (LaneId id = 0; id < lanes_.size(); ++id) {
    if (lanes_[id].wake) kept.push_back({*lanes_[id].wake, id});
  }
  wakes_ = decltype(wakes_)(std::greater<>(), std::move(kept));
}

std::size_t LinkFlow::under_way() const {
  std::size_t count = waiting_.size();
  for (const Lane& lane : lanes_) count += lane.members.size();
  return count;
}

void LinkFlow::check() const {
  std::vector<std::array<std::uint64_t, 2>> flowing(ports_.size());
  std::set<std::pair<Tick, LaneId>> queued;
  for (auto queue = wakes_; !queue.empty(); queue.pop()) queued.insert({queue.top().tick, queue.top().lane});
  for (LaneId id = 0; id < lanes_.size(); ++id) {
    const Lane& lane = lanes_[id];
    for (std::uint32_t i = 0; i < lane.num_ports; ++i)
      flowing[lane.ports[i]][static_cast<std::size_t>(lane.priority)] += lane.members.size();
    if (lane.wake && !queued.contains({*lane.wake, id})) broken("a lane's end is not in the queue");
    if (lane.members.empty()) {
      if (lane.served != 0 || lane.wake) broken("an empty lane still moves bytes");
      continue;
    }
    if (share(lane) != std::pair{lane.bytes_per_second, lane.sharers}) broken("a lane does not move at its share");
    if (lane.members.top().ends_at < lane.served) broken("a transfer outlived its last byte");
    if (lane.bytes_per_second > 0 && !lane.wake) broken("a moving lane has no end");
  }
  if (!wakes_.empty() && lanes_[wakes_.top().lane].wake != wakes_.top().tick) broken("the queue has an end of no lane");
  if (wakes_.size() > max_wakes()) broken("the queue keeps too many ends that were given up");
  for (std::size_t id = 0; id < ports_.size(); ++id) {
    if (flowing[id] != ports_[id].flowing) broken("the transfers on a link are miscounted");
  }
}

}  // namespace understudy
