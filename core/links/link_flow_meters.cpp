// Settles what has moved by now, and predicts the next end of a group.
#include <algorithm>

#include "links/link_flow_ends.hpp"

namespace understudy {

// ── Counting ──

double LinkFlow::lag_of(const Lane& lane) const {
  return lane.held_back ? groups_[lane.group].meter.lag + lane.lag_base : lane.meter.lag;
}

void LinkFlow::settle(Group& group, Tick now, Listener* listener) {
  const Tick from = group.meter.settled_at;
  if (group.members == 0) {  // the count starts again with the first lane held back
    group.meter.settled_at = now;
    return;
  }
  const Wide served = group.meter.settle(now);
  if (served > 0 && listener != nullptr) {
    listener->moved(group.link, from, now, served * group.members);
  }
}

// A held-back lane is settled rarely, so its bytes count as moved evenly since the last time.
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

void LinkFlow::report_moving(std::uint32_t link, PortId port, Tick now, Listener& listener) const {
  const auto report = [&](const Lane& lane) {
    if (lane.members.empty()) return;
    Wide more = lane.meter.moving(now);
    if (lane.held_back) {
      const Meter& group = groups_[lane.group].meter;
      more = group.served + group.moving(now) - lane.base - lane.meter.served;
    }
    if (more > 0) listener.moved(link, lane.meter.settled_at, now, more * lane.members.size());
  };
  for (const LaneId id : ports_[port].lanes) {
    if (lanes_[id].links[0] == link) report(lanes_[id]);
  }
  for (const GroupId id : ports_[port].groups) {
    const Group& group = groups_[id];
    if (group.link != link) continue;
    const Wide more = group.meter.moving(now);
    if (more > 0 && group.members > 0) listener.moved(link, group.meter.settled_at, now, more * group.members);
    std::vector<ByRate> free(group.free.entries().begin(), group.free.entries().end());
    std::ranges::sort(free, std::less<>());
    for (const ByRate& lane : free) report(lanes_[lane.id]);
  }
}

void LinkFlow::set_wake(Group& group) {
  Tick wake = kNever;
  if (!group.by_end.empty()) {
    const auto& [ends_at, id] = group.by_end.top();
    wake = wake_of(group.meter, ends_at, lag_of(lanes_[id]) - lanes_[id].members.top().lag, group.late_ticks);
  }
  if (wake == group.wake) return;
  ++operations_;
  group.wake = wake;
  wake_at(true, static_cast<GroupId>(&group - groups_.data()), wake);
}

}  // namespace understudy
