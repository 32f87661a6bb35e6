#include "base/assert.hpp"
#include "links/link_flow_ends.hpp"

#include <algorithm>
#include <limits>

#include "base/errors.hpp"

namespace understudy {

namespace {

[[noreturn]] void broken(const char* what) { throw Error(ErrorKind::InvariantViolated, "links: ", what); }

}  // namespace

// ── Ports and lanes ──

LinkFlow::PortId LinkFlow::add_port(std::uint64_t bytes_per_second, bool demand_first) {
  Port port;
  port.bytes_per_second = port.made_with = bytes_per_second;
  port.demand_first = demand_first;
  ports_.push_back(std::move(port));
  return static_cast<PortId>(ports_.size() - 1);
}

void LinkFlow::set_bandwidth(PortId id, std::uint64_t bytes_per_second, Tick now, Listener* listener) {
  Port& port = ports_[id];
  port.bytes_per_second = bytes_per_second;
  for (const LaneId lane : port.lanes) {
    if (!lanes_[lane].members.empty()) update(lane, now, 0, listener);
  }
  for (const GroupId group : port.groups) {
    if (update(groups_[group], now, 0, listener)) set_wake(groups_[group]);
  }
}

LinkFlow::LaneId LinkFlow::lane(std::span<const std::uint32_t> links, std::span<const PortId> own,
                                std::span<const PortId> common, Priority priority) {
  for (const LaneId id : ports_[own.front()].lanes) {
    const Lane& known = lanes_[id];
    if (known.priority == priority && std::ranges::equal(links, std::span(known.links).first(known.num_links)))
      return id;
  }
  Lane lane;
  lane.priority = priority;
  lane.num_links = static_cast<std::uint32_t>(links.size());
  std::ranges::copy(links, lane.links.begin());
  lane.num_own = static_cast<std::uint32_t>(own.size());
  const LaneId id = static_cast<LaneId>(lanes_.size());
  for (const std::span<const PortId> part : {own, common}) {
    for (const PortId port : part) {
      lane.ports[lane.num_ports++] = port;
      const std::uint64_t limit = ports_[port].made_with;
      if (limit > 0 && (lane.least_port == 0 || limit < lane.least_port)) lane.least_port = limit;
    }
  }
  for (const PortId port : own) {
    for (const LaneId other : ports_[port].lanes) lanes_[other].alone = false;
    lane.alone = own.size() == 1 && common.empty() && lane.least_port > 0 && ports_[port].lanes.empty() &&
                 ports_[port].groups.empty();
    ports_[port].lanes.push_back(id);
  }
  if (!common.empty()) {
    for (const GroupId group : ports_[common.front()].groups) {
      const Group& known = groups_[group];
      if (known.priority == priority && known.link == links.back() && std::ranges::equal(ports_of(known), common))
        lane.group = group;
    }
    if (lane.group == kNoGroup) {
      lane.group = static_cast<GroupId>(groups_.size());
      Group& group = groups_.emplace_back();
      group.priority = priority;
      group.link = links.back();
      for (const PortId port : common) {
        for (const LaneId other : ports_[port].lanes) lanes_[other].alone = false;
        group.ports[group.num_ports++] = port;
        ports_[port].groups.push_back(lane.group);
      }
      group.meter.set_rate(share(common, priority), 0);
    }
  }
  lanes_.push_back(std::move(lane));
  return id;
}

// ── Events ──

void LinkFlow::start(std::int64_t now_ns, std::int64_t flow_ns, LaneId lane, TransferId first,
                     std::span<const std::uint64_t> bytes, std::vector<Completion>& ended, Listener* listener) {
  if (flow_ns <= now_ns && lanes_[lane].alone) {
    join_alone(lane, tick_of(flow_ns), first, bytes, ended, listener);
    return;
  }
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (flow_ns > now_ns) {
      waiting_.insert({flow_ns, first + i, lane, bytes[i]});
    } else {
      join(lane, tick_of(flow_ns), first + i, bytes[i], ended, listener);
    }
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
      if (wake.of_group()) {
        const Group& group = groups_[wake.number()];
        leave(group.by_end.top().id, wake.tick, group.late_ticks, ended, listener);
      } else {
        leave(wake.number(), wake.tick, lanes_[wake.number()].late_ticks, ended, listener);
      }
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
  Lane& lane = lanes_[id];
  if (lane.alone) return join_alone(id, now, transfer, std::span(&bytes, 1), ended, listener);
  ++operations_;
  if (lane.least_port == 0 || bytes == 0) {
    ended.push_back({ns_after(now), transfer});
    if (listener != nullptr) listener->ended(lane, ns_after(now), bytes);
    return;
  }
  withdraw(id, now, listener);
  lane.members.push(lane.meter.served + bytes * kUnitsPerByte, transfer, bytes, lane.meter.lag);
  count(lane, now, true);
  reshare(id, now, 0, listener);
}

// Ends the first member and all others that end at the same count.
void LinkFlow::leave(LaneId id, Tick now, double late_ticks, std::vector<Completion>& ended, Listener* listener) {
  Lane& lane = lanes_[id];
  if (lane.alone) return leave_alone(id, now, late_ticks, ended, listener);
  UNDERSTUDY_ASSERT(!lane.members.empty(), "an end without a transfer");
  withdraw(id, now, listener);
  lane.meter.served = std::max(lane.meter.served, lane.members.top().ends_at);  // rounding must not delay the end
  while (!lane.members.empty() && lane.members.top().ends_at <= lane.meter.served) {
    ++operations_;
    const Member& member = lane.members.top();
    ended.push_back({ns_after(now), member.id});
    if (listener != nullptr) listener->ended(lane, ns_after(now), member.bytes);
    lane.members.pop();
    count(lane, now, false);
  }
  if (lane.members.empty()) {  // keeps the counts small
    lane.meter.served = 0;
    lane.meter.lag = 0;
  }
  reshare(id, now, late_ticks, listener);
}

void LinkFlow::count(const Lane& lane, Tick now, bool more) {
  for (std::uint32_t i = 0; i < lane.num_ports; ++i) {
    Port& port = ports_[lane.ports[i]];
    if (more && port.flowing[0] + port.flowing[1] == 0) port.busy_since = now;
    UNDERSTUDY_ASSERT(more || port.flowing[static_cast<std::size_t>(lane.priority)] > 0, "a port counts below zero");
    port.flowing[static_cast<std::size_t>(lane.priority)] += more ? 1 : std::uint64_t(-1);
    if (!more && port.flowing[0] + port.flowing[1] == 0) port.busy_ticks += now - port.busy_since;
  }
}

// ── Watch ──

std::size_t LinkFlow::under_way() const {
  std::size_t count = waiting_.size();
  for (const Lane& lane : lanes_) count += lane.members.size();
  return count;
}

void LinkFlow::check() const {
  std::vector<std::array<std::uint64_t, 2>> flowing(ports_.size());
  std::vector<double> used(ports_.size());  // bytes per second
  std::vector<std::uint64_t> held_back(groups_.size());
  for (LaneId id = 0; id < lanes_.size(); ++id) {
    const Lane& lane = lanes_[id];
    for (std::uint32_t i = 0; i < lane.num_ports; ++i)
      flowing[lane.ports[i]][static_cast<std::size_t>(lane.priority)] += lane.members.size();
    const Wake* const wake = wakes_.find(2 * id);
    if (lane.wake != (wake == nullptr ? kNever : wake->tick)) broken("a lane's end is not in the queue");
    if (lane.members.empty()) {
      if (lane.meter.served != 0 || wake != nullptr || lane.listed) broken("an empty lane still moves bytes");
      continue;
    }
    if (lane.own != share(own_ports(lane), lane.priority)) broken("a lane does not know its share");
    const bool by_group = lane.group != kNoGroup && !lane.own.slower_than(groups_[lane.group].meter.rate);
    if (lane.held_back != by_group) broken("a lane does not move at the least of its shares");
    if (lane.held_back) held_back[lane.group] += lane.members.size();
    if (!lane.held_back && lane.meter.rate != lane.own) broken("a lane does not move at its share");
    const Share& rate = lane.held_back ? groups_[lane.group].meter.rate : lane.meter.rate;
    for (std::uint32_t i = 0; rate.moves() && i < lane.num_ports; ++i)
      used[lane.ports[i]] += rate.units_per_tick() * static_cast<double>(lane.members.size());
    if (lane.members.top().ends_at < lane.meter.served) broken("a transfer outlived its last byte");
    if (!lane.held_back && lane.own.bytes_per_second > 0 && wake == nullptr) broken("a moving lane has no end");
  }
  for (GroupId id = 0; id < groups_.size(); ++id) {
    const Group& group = groups_[id];
    if (group.meter.rate != share(ports_of(group), group.priority)) broken("a group does not know its share");
    if (group.members != held_back[id]) broken("the transfers of a group are miscounted");
    if (group.by_end.size() != group.held_back.size()) broken("the ends of a group are miscounted");
    const Wake* const wake = wakes_.find(2 * id + 1);
    if (group.wake != (wake == nullptr ? kNever : wake->tick)) broken("a group's end is not in the queue");
    if (!group.by_end.empty() && group.meter.rate.bytes_per_second > 0 && wake == nullptr) broken("a group has no end");
  }
  for (std::size_t id = 0; id < ports_.size(); ++id) {
    if (flowing[id] != ports_[id].flowing) broken("the transfers on a link are miscounted");
    const auto limit = static_cast<double>(ports_[id].bytes_per_second);
    if (limit > 0 && used[id] > limit * (1 + 1e-9)) broken("transfers move faster than their link");
  }
}

}  // namespace understudy
