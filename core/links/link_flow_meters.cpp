// What has moved by now, and when a transfer will have moved all of it.
#include <algorithm>
#include <bit>

#include "links/link_flow.hpp"

namespace understudy {

namespace {

constexpr LinkFlow::Tick kWhole = LinkFlow::Tick{1} << LinkFlow::kTickBits;

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
  wakes_.set(false, id, wake);
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
  wakes_.set(true, static_cast<GroupId>(&group - groups_.data()), wake);
}

}  // namespace understudy
