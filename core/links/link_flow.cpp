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
constexpr Wide kMuch = Wide{1} << 110;  // a group's count starts anew before it gets there

[[noreturn]] void broken(const char* what) { throw Error(ErrorKind::InvariantViolated, "links: ", what); }

}  // namespace

// ── Counting ──

LinkFlow::Wide LinkFlow::Meter::moving(Tick now) const {
  if (rate.unlimited || rate.bytes_per_second == 0) return 0;
  const Wide all = (now - settled_at) * rate.bytes_per_second;
  // Dividing 128 bits is slow, and sharers are most often one, two or four.
  return std::has_single_bit(rate.sharers) ? all >> std::countr_zero(rate.sharers) : all / rate.sharers;
}

LinkFlow::Wide LinkFlow::Meter::settle(Tick now) {
  const Wide more = moving(now);
  if (more > 0 && more * rate.sharers != (now - settled_at) * rate.bytes_per_second) lag += 1;
  served += more;
  settled_at = now;
  return more;
}

void LinkFlow::Meter::set_rate(const Share& new_rate, double late_ticks) {
  lag += late_ticks * std::max(new_rate.units_per_tick() - rate.units_per_tick(), 0.0);
  rate = new_rate;
}

double LinkFlow::lag_of(const Lane& lane) const {
  return lane.held_back ? groups_[lane.group].meter.lag + lane.lag_base : lane.meter.lag;
}

void LinkFlow::settle(Group& group, Tick now, Listener* listener) {
  const Tick from = group.meter.settled_at;
  const Wide served = group.meter.settle(now);
  if (served > 0 && listener != nullptr && group.members > 0) {
    listener->moved(group.link, from, now, served * group.members);
  }
}

// A lane that is held back is looked at seldom, so what it moved over its own link counts as moved evenly since then.
void LinkFlow::settle(Lane& lane, Tick now, Listener* listener) {
  const Tick from = lane.meter.settled_at;
  if (lane.held_back) {
    Group& group = groups_[lane.group];
    settle(group, now, listener);
    const Wide served = group.meter.served - lane.base;
    const Wide more = served - lane.meter.served;
    lane.meter.served = served;
    lane.meter.settled_at = now;
    if (more > 0 && listener != nullptr) listener->moved(lane.links[0], from, now, more * lane.members.size());
    return;
  }
  if (lane.members.empty()) {
    lane.meter.settled_at = now;
    return;
  }
  const Wide served = lane.meter.settle(now);
  if (served == 0 || listener == nullptr) return;
  for (std::uint32_t i = 0; i < lane.num_links; ++i) {
    listener->moved(lane.links[i], from, now, served * lane.members.size());
  }
}

void LinkFlow::tell_moving(std::uint32_t link, PortId port, Tick now, Listener& listener) const {
  const auto tell = [&](const Lane& lane) {
    if (lane.members.empty()) return;
    Wide more = lane.meter.moving(now);
    if (lane.held_back) {
      const Meter& group = groups_[lane.group].meter;
      more = group.served + group.moving(now) - lane.base - lane.meter.served;
    }
    if (more > 0) listener.moved(link, lane.meter.settled_at, now, more * lane.members.size());
  };
  for (const LaneId id : ports_[port].lanes) {
    if (lanes_[id].links[0] == link) tell(lanes_[id]);
  }
  for (const GroupId id : ports_[port].groups) {
    const Group& group = groups_[id];
    if (group.link != link) continue;
    const Wide more = group.meter.moving(now);
    if (more > 0 && group.members > 0) listener.moved(link, group.meter.settled_at, now, more * group.members);
    for (const ByRate& lane : group.free) tell(lanes_[lane.lane]);
  }
}

// ── Ports and lanes ──

LinkFlow::PortId LinkFlow::add_port(std::uint64_t bytes_per_second, bool demand_first) {
  Port port;
  port.bytes_per_second = bytes_per_second;
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
  for (const GroupId group : port.groups) update(groups_[group], now, 0, listener);
  forget_old_wakes();
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
      const std::uint64_t limit = ports_[port].bytes_per_second;
      if (limit > 0 && (lane.least_port == 0 || limit < lane.least_port)) lane.least_port = limit;
    }
  }
  for (const PortId port : own) ports_[port].lanes.push_back(id);
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
        group.ports[group.num_ports++] = port;
        ports_[port].groups.push_back(lane.group);
      }
      group.meter.rate = share(common, priority);
    }
  }
  lanes_.push_back(std::move(lane));
  return id;
}

// ── Events ──

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
      if (wake.of_group) {
        const Group& group = groups_[wake.id];
        leave(group.by_end.begin()->second, wake.tick, group.late_ticks, ended, listener);
      } else {
        leave(wake.id, wake.tick, lanes_[wake.id].late_ticks, ended, listener);
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
  ++operations_;
  Lane& lane = lanes_[id];
  if (lane.least_port == 0 || bytes == 0) {
    ended.push_back({ns_after(now), transfer});
    if (listener != nullptr) listener->ended(lane, ns_after(now), bytes);
    return;
  }
  withdraw(id, now, listener);
  lane.members.push({lane.meter.served + bytes * kUnitsPerByte, transfer, bytes, lane.meter.lag});
  count(lane, now, true);
  reshare(id, now, 0, listener);
}

// The first member ends, and with it those that end at the same count.
void LinkFlow::leave(LaneId id, Tick now, double late_ticks, std::vector<Completion>& ended, Listener* listener) {
  Lane& lane = lanes_[id];
  withdraw(id, now, listener);
  lane.meter.served = std::max(lane.meter.served, lane.members.top().ends_at);  // rounding must not keep it here
  while (!lane.members.empty() && lane.members.top().ends_at <= lane.meter.served) {
    ++operations_;
    const Member& member = lane.members.top();
    ended.push_back({ns_after(now), member.id});
    if (listener != nullptr) listener->ended(lane, ns_after(now), member.bytes);
    lane.members.pop();
    count(lane, now, false);
  }
  if (lane.members.empty()) {  // keeps the numbers small
    lane.meter.served = 0;
    lane.meter.lag = 0;
  }
  reshare(id, now, late_ticks, listener);
}

void LinkFlow::count(const Lane& lane, Tick now, bool more) {
  for (std::uint32_t i = 0; i < lane.num_ports; ++i) {
    Port& port = ports_[lane.ports[i]];
    if (more && port.flowing[0] + port.flowing[1] == 0) port.busy_since = now;
    port.flowing[static_cast<std::size_t>(lane.priority)] += more ? 1 : std::uint64_t(-1);
    if (!more && port.flowing[0] + port.flowing[1] == 0) port.busy_ticks += now - port.busy_since;
  }
}

// After a lane gained or lost members: new shares for those who have a port in common with it.
void LinkFlow::reshare(LaneId changed, Tick now, double late_ticks, Listener* listener) {
  for (std::uint32_t i = 0; i < lanes_[changed].num_ports; ++i) {
    const Port& port = ports_[lanes_[changed].ports[i]];
    for (const LaneId id : port.lanes) {
      if (id != changed && !lanes_[id].members.empty()) update(id, now, late_ticks, listener);
    }
    for (const GroupId id : port.groups) update(groups_[id], now, late_ticks, listener);
  }
  if (lanes_[changed].members.empty()) {
    lanes_[changed].wake.reset();
  } else {
    enlist(changed, now, late_ticks, listener);
  }
  if (lanes_[changed].group != kNoGroup) set_wake(groups_[lanes_[changed].group]);
  forget_old_wakes();
}

void LinkFlow::update(LaneId id, Tick now, double late_ticks, Listener* listener) {
  ++operations_;
  if (share(own_ports(lanes_[id]), lanes_[id].priority) == lanes_[id].own) return;
  withdraw(id, now, listener);
  enlist(id, now, late_ticks, listener);
  if (lanes_[id].group != kNoGroup) set_wake(groups_[lanes_[id].group]);
}

// A group has a new share: those whose own is less now go by that, and those for whom it is no longer come back.
void LinkFlow::update(Group& group, Tick now, double late_ticks, Listener* listener) {
  ++operations_;
  const Share rate = share(ports_of(group), group.priority);
  if (rate == group.meter.rate) return;
  settle(group, now, listener);
  group.meter.set_rate(rate, late_ticks);
  while (!group.held_back.empty() && group.held_back.begin()->own.slower_than(rate)) {
    const LaneId id = group.held_back.begin()->lane;
    ++operations_;
    settle(lanes_[id], now, listener);
    let_go(id, group);
    lanes_[id].meter.rate = lanes_[id].own;
    group.free.insert({lanes_[id].own, id});
    set_wake(id);
  }
  while (!group.free.empty() && !group.free.rbegin()->own.slower_than(rate)) {
    const LaneId id = group.free.rbegin()->lane;
    ++operations_;
    settle(lanes_[id], now, listener);
    lanes_[id].meter.set_rate(rate, late_ticks);
    group.free.erase(std::prev(group.free.end()));
    hold_back(id, group);
  }
  set_wake(group);
}

// Gives a lane with members its rate.
void LinkFlow::enlist(LaneId id, Tick now, double late_ticks, Listener* listener) {
  Lane& lane = lanes_[id];
  lane.own = share(own_ports(lane), lane.priority);
  lane.listed = true;
  if (lane.group == kNoGroup) {
    lane.meter.set_rate(lane.own, late_ticks);
    set_wake(id);
    return;
  }
  Group& group = groups_[lane.group];
  const bool own = lane.own.slower_than(group.meter.rate);
  lane.meter.set_rate(own ? lane.own : group.meter.rate, late_ticks);
  if (own) {
    group.free.insert({lane.own, id});
    set_wake(id);
  } else {
    settle(group, now, listener);
    hold_back(id, group);
  }
}

// Takes it out of its group; its own meter is as of now, and goes on as before until it is enlisted again.
void LinkFlow::withdraw(LaneId id, Tick now, Listener* listener) {
  Lane& lane = lanes_[id];
  settle(lane, now, listener);
  if (!lane.listed) return;
  lane.listed = false;
  if (lane.group == kNoGroup) return;
  Group& group = groups_[lane.group];
  if (lane.held_back) {
    let_go(id, group);
  } else {
    group.free.erase({lane.own, id});
  }
}

// Both meters are as of now.
void LinkFlow::hold_back(LaneId id, Group& group) {
  Lane& lane = lanes_[id];
  if (group.held_back.empty()) {
    group.meter.served = 0;  // keeps the numbers small
    group.meter.lag = 0;
  } else if (group.meter.served > kMuch) {
    const Wide past = std::min(group.by_end.begin()->first, group.meter.served);
    std::set<std::pair<Wide, LaneId>> by_end;
    for (const auto& [ends_at, other] : group.by_end) {
      by_end.insert({ends_at - past, other});
      lanes_[other].base -= past;
    }
    group.by_end = std::move(by_end);
    group.meter.served -= past;
  }
  lane.held_back = true;
  lane.base = group.meter.served - lane.meter.served;
  lane.lag_base = lane.meter.lag - group.meter.lag;
  lane.wake.reset();
  group.held_back.insert({lane.own, id});
  group.by_end.insert({lane.base + lane.members.top().ends_at, id});
  group.members += lane.members.size();
}

void LinkFlow::let_go(LaneId id, Group& group) {
  Lane& lane = lanes_[id];
  lane.meter.lag = lag_of(lane);
  lane.meter.rate = group.meter.rate;
  lane.held_back = false;
  group.held_back.erase({lane.own, id});
  group.by_end.erase({lane.base + lane.members.top().ends_at, id});
  group.members -= lane.members.size();
}

// The least of the shares of these ports. Of a port that serves demand first, background gets nothing while there is
// demand.
LinkFlow::Share LinkFlow::share(std::span<const PortId> ports, Priority priority) const {
  Share least;
  for (const PortId id : ports) {
    const Port& port = ports_[id];
    if (port.bytes_per_second == 0) continue;  // room for everybody
    const auto [demand, background] = port.flowing;
    Share here{port.bytes_per_second, std::max<std::uint64_t>(demand + background, 1), false};
    if (port.demand_first && demand > 0) {
      if (priority == Priority::Background) return {0, 1, false};
      here.sharers = demand;
    }
    if (here.slower_than(least)) least = here;
  }
  return least;
}

// ── Ends ──

// Rounded up. Most transfers have one of a few sizes, and dividing 128 bits is slow.
LinkFlow::Tick LinkFlow::ticks_for(Wide units, std::uint64_t bytes_per_second) {
  Quotient& known = quotients_[static_cast<std::uint64_t>(units >> kTickBits) * 0x9E3779B97F4A7C15u >> 60];
  if (known.units != units || known.bytes_per_second != bytes_per_second) {
    known = {units, bytes_per_second, (units + bytes_per_second - 1) / bytes_per_second};
  }
  return known.ticks;
}

std::optional<LinkFlow::Tick> LinkFlow::wake_of(const Meter& meter, Wide ends_at, double lag, double& late_ticks) {
  if (meter.rate.unlimited || meter.rate.bytes_per_second == 0) return std::nullopt;
  const Wide left = ends_at > meter.served ? (ends_at - meter.served) * meter.rate.sharers : 0;
  Tick wake = meter.settled_at + ticks_for(left, meter.rate.bytes_per_second);
  late_ticks = lag / meter.rate.units_per_tick() + 1;
  const Tick past = wake & (kWhole - 1);
  const auto past_ticks = static_cast<double>(static_cast<std::uint64_t>(past));
  if (past_ticks <= late_ticks && wake - past >= meter.settled_at) {
    wake -= past;
    late_ticks -= past_ticks;
  }
  return wake;
}

void LinkFlow::set_wake(LaneId id) {
  Lane& lane = lanes_[id];
  std::optional<Tick> wake;
  if (!lane.members.empty()) {
    const Member& first = lane.members.top();
    wake = wake_of(lane.meter, first.ends_at, lane.meter.lag - first.lag, lane.late_ticks);
  }
  if (wake == lane.wake) return;
  ++operations_;
  lane.wake = wake;
  if (wake) wakes_.push({*wake, false, id});
}

void LinkFlow::set_wake(Group& group) {
  std::optional<Tick> wake;
  if (!group.by_end.empty()) {
    const auto& [ends_at, id] = *group.by_end.begin();
    wake = wake_of(group.meter, ends_at, lag_of(lanes_[id]) - lanes_[id].members.top().lag, group.late_ticks);
  }
  if (wake == group.wake) return;
  ++operations_;
  group.wake = wake;
  if (wake) wakes_.push({*wake, true, static_cast<GroupId>(&group - groups_.data())});
}

void LinkFlow::forget_old_wakes() {
  while (!wakes_.empty() && wake_at(wakes_.top()) != wakes_.top().tick) wakes_.pop();
  if (wakes_.size() <= max_wakes()) return;
  std::vector<Wake> kept;
  for (LaneId id = 0; id < lanes_.size(); ++id) {
    if (lanes_[id].wake) kept.push_back({*lanes_[id].wake, false, id});
  }
  for (GroupId id = 0; id < groups_.size(); ++id) {
    if (groups_[id].wake) kept.push_back({*groups_[id].wake, true, id});
  }
  wakes_ = decltype(wakes_)(std::greater<>(), std::move(kept));
}

// ── Watch ──

std::size_t LinkFlow::under_way() const {
  std::size_t count = waiting_.size();
  for (const Lane& lane : lanes_) count += lane.members.size();
  return count;
}

void LinkFlow::check() const {
  std::vector<std::array<std::uint64_t, 2>> flowing(ports_.size());
  std::vector<std::uint64_t> held_back(groups_.size());
  std::set<std::tuple<Tick, bool, std::uint32_t>> queued;
  for (auto queue = wakes_; !queue.empty(); queue.pop()) {
    queued.insert({queue.top().tick, queue.top().of_group, queue.top().id});
  }
  for (LaneId id = 0; id < lanes_.size(); ++id) {
    const Lane& lane = lanes_[id];
    for (std::uint32_t i = 0; i < lane.num_ports; ++i)
      flowing[lane.ports[i]][static_cast<std::size_t>(lane.priority)] += lane.members.size();
    if (lane.wake && !queued.contains({*lane.wake, false, id})) broken("a lane's end is not in the queue");
    if (lane.members.empty()) {
      if (lane.meter.served != 0 || lane.wake || lane.listed) broken("an empty lane still moves bytes");
      continue;
    }
    if (lane.own != share(own_ports(lane), lane.priority)) broken("a lane does not know its share");
    const bool by_group = lane.group != kNoGroup && !lane.own.slower_than(groups_[lane.group].meter.rate);
    if (lane.held_back != by_group) broken("a lane does not move at the least of its shares");
    if (lane.held_back) held_back[lane.group] += lane.members.size();
    if (!lane.held_back && lane.meter.rate != lane.own) broken("a lane does not move at its share");
    if (lane.members.top().ends_at < lane.meter.served) broken("a transfer outlived its last byte");
    if (!lane.held_back && lane.own.bytes_per_second > 0 && !lane.wake) broken("a moving lane has no end");
  }
  for (GroupId id = 0; id < groups_.size(); ++id) {
    const Group& group = groups_[id];
    if (group.meter.rate != share(ports_of(group), group.priority)) broken("a group does not know its share");
    if (group.members != held_back[id]) broken("the transfers of a group are miscounted");
    if (group.by_end.size() != group.held_back.size()) broken("the ends of a group are miscounted");
    if (group.wake && !queued.contains({*group.wake, true, id})) broken("a group's end is not in the queue");
    if (!group.by_end.empty() && group.meter.rate.bytes_per_second > 0 && !group.wake) broken("a group has no end");
  }
  if (!wakes_.empty() && wake_at(wakes_.top()) != wakes_.top().tick) broken("the queue has an end of nobody");
  if (wakes_.size() > max_wakes()) broken("the queue keeps too many ends that were given up");
  for (std::size_t id = 0; id < ports_.size(); ++id) {
    if (flowing[id] != ports_[id].flowing) broken("the transfers on a link are miscounted");
  }
}

}  // namespace understudy
