// Assigns shares: a lane moves at the share of its own ports, or at its group's where that is the bottleneck.
#include <algorithm>

#include "base/assert.hpp"
#include "links/link_flow_ends.hpp"

namespace understudy {

namespace {

constexpr LinkFlow::Wide kRebaseAbove = LinkFlow::Wide{1} << 110;  // a group's count restarts before it overflows

}  // namespace

// Recomputes the shares of all lanes and groups that share a port with a lane whose members changed.
void LinkFlow::reshare(LaneId changed, Tick now, double late_ticks, Listener* listener) {
  for (std::uint32_t i = 0; i < lanes_[changed].num_ports; ++i) {
    const Port& port = ports_[lanes_[changed].ports[i]];
    for (const LaneId id : port.lanes) {
      if (id != changed && !lanes_[id].members.empty()) update(id, now, late_ticks, listener);
    }
    for (const GroupId id : port.groups) {
      if (update(groups_[id], now, late_ticks, listener) && id != lanes_[changed].group) set_wake(groups_[id]);
    }
  }
  if (lanes_[changed].members.empty()) {
    lanes_[changed].wake = kNever;
    wake_at(false, changed, kNever);
  } else {
    enlist(changed, now, late_ticks, listener);
  }
  if (lanes_[changed].group != kNoGroup) set_wake(groups_[lanes_[changed].group]);
}

void LinkFlow::update(LaneId id, Tick now, double late_ticks, Listener* listener) {
  ++operations_;
  if (share(own_ports(lanes_[id]), lanes_[id].priority) == lanes_[id].own) return;
  withdraw(id, now, listener);
  enlist(id, now, late_ticks, listener);
  if (lanes_[id].group != kNoGroup) set_wake(groups_[lanes_[id].group]);
}

// Returns false if the group's share did not change. Else moves lanes whose bottleneck changed between `held_back` and
// `free`; the caller sets the group's next end.
bool LinkFlow::update(Group& group, Tick now, double late_ticks, Listener* listener) {
  ++operations_;
  const Share rate = share(ports_of(group), group.priority);
  if (rate == group.meter.rate) return false;
  settle(group, now, listener);
  group.meter.set_rate(rate, group.members == 0 ? 0 : late_ticks);
  while (!group.held_back.empty() && group.held_back.top().own.slower_than(rate)) {
    const LaneId id = group.held_back.top().id;
    ++operations_;
    settle(lanes_[id], now, listener);
    stop_holding_back(id, group);
    lanes_[id].meter.set_rate(lanes_[id].own, 0);
    group.free.set({lanes_[id].own, id});
    set_wake(id);
  }
  while (!group.free.empty() && !group.free.top().own.slower_than(rate)) {
    const LaneId id = group.free.top().id;
    ++operations_;
    settle(lanes_[id], now, listener);
    lanes_[id].meter.set_rate(rate, late_ticks);
    group.free.erase(id);
    hold_back(id, group);
  }
  return true;
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
    group.free.set({lane.own, id});
    set_wake(id);
  } else {
    settle(group, now, listener);
    hold_back(id, group);
  }
}

// Takes the lane out of its group; its own meter is as of now and keeps its rate until it is enlisted again.
void LinkFlow::withdraw(LaneId id, Tick now, Listener* listener) {
  Lane& lane = lanes_[id];
  settle(lane, now, listener);
  if (!lane.listed) return;
  lane.listed = false;
  if (lane.group == kNoGroup) return;
  Group& group = groups_[lane.group];
  if (lane.held_back) {
    stop_holding_back(id, group);
  } else {
    group.free.erase(id);
  }
}

// Needs both meters settled to now.
void LinkFlow::hold_back(LaneId id, Group& group) {
  Lane& lane = lanes_[id];
  UNDERSTUDY_ASSERT(!lane.held_back && !lane.members.empty(), "holds back a lane twice, or an empty one");
  if (group.held_back.empty()) {
    group.meter.served = 0;  // keeps the counts small
    group.meter.lag = 0;
  } else if (group.meter.served > kRebaseAbove) {
    const Wide past = std::min(group.by_end.top().ends_at, group.meter.served);
    group.by_end.change_all([&](ByEnd& other) {
      other.ends_at -= past;
      lanes_[other.id].base -= past;
    });
    group.meter.served -= past;
  }
  lane.held_back = true;
  lane.base = group.meter.served - lane.meter.served;
  lane.lag_base = lane.meter.lag - group.meter.lag;
  lane.wake = kNever;
  wake_at(false, id, kNever);
  group.held_back.set({lane.own, id});
  // A lane that is due at this very tick may have moved more by rounding: its end is now.
  group.by_end.set({lane.base + std::max(lane.members.top().ends_at, lane.meter.served), id});
  group.members += lane.members.size();
}

void LinkFlow::stop_holding_back(LaneId id, Group& group) {
  Lane& lane = lanes_[id];
  UNDERSTUDY_ASSERT(lane.held_back && group.members >= lane.members.size(), "a group has lost count of its members");
  lane.meter.lag = lag_of(lane);
  lane.meter.set_rate(group.meter.rate, 0);
  lane.held_back = false;
  group.held_back.erase(id);
  group.by_end.erase(id);
  group.members -= lane.members.size();
}

}  // namespace understudy
