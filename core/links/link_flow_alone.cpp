// Lanes that have their port to themselves, as most links between a worker and its host: the general case without a
// search for competitors.
#include <algorithm>

#include "base/assert.hpp"
#include "links/link_flow_ends.hpp"

namespace understudy {

void LinkFlow::join_alone(LaneId id, Tick now, TransferId first, std::span<const std::uint64_t> bytes,
                          std::vector<Completion>& ended, Listener* listener) {
  Lane& lane = lanes_[id];
  Port& port = ports_[lane.ports[0]];
  bool more = false;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    ++operations_;
    if (bytes[i] == 0) {
      ended.push_back({ns_after(now), first + i});
      if (listener != nullptr) listener->ended(lane, ns_after(now), 0);
      continue;
    }
    if (!more) {
      settle_alone(lane, now, listener);
      if (lane.members.empty()) port.busy_since = now;
      more = true;
    }
    lane.members.push(lane.meter.served + bytes[i] * kUnitsPerByte, first + i, bytes[i], lane.meter.lag);
  }
  if (more) reshare_alone(id, port, 0);
}

void LinkFlow::leave_alone(LaneId id, Tick now, double late_ticks, std::vector<Completion>& ended, Listener* listener) {
  Lane& lane = lanes_[id];
  UNDERSTUDY_ASSERT(!lane.members.empty(), "an end without a transfer");
  settle_alone(lane, now, listener);
  const Wide served = std::max(lane.meter.served, lane.members.top().ends_at);  // rounding must not delay the end
  const std::int64_t now_ns = ns_after(now);
  do {
    ++operations_;
    const Member& member = lane.members.top();
    ended.push_back({now_ns, member.id});
    if (listener != nullptr) listener->ended(lane, now_ns, member.bytes);
    lane.members.pop();
  } while (!lane.members.empty() && lane.members.top().ends_at <= served);
  Port& port = ports_[lane.ports[0]];
  lane.meter.served = served;
  if (lane.members.empty()) {  // keeps the counts small
    port.busy_ticks += now - port.busy_since;
    lane.meter.served = 0;
    lane.meter.lag = 0;
  }
  reshare_alone(id, port, late_ticks);
}

void LinkFlow::settle_alone(Lane& lane, Tick now, Listener* listener) {
  const Tick from = lane.meter.settled_at;
  if (lane.members.empty()) {
    lane.meter.settled_at = now;
    return;
  }
  const Wide served = lane.meter.settle(now);
  if (served > 0 && listener != nullptr) listener->moved(lane.links[0], from, now, served * lane.members.size());
}

void LinkFlow::reshare_alone(LaneId id, Port& port, double late_ticks) {
  Lane& lane = lanes_[id];
  const std::size_t members = lane.members.size();
  port.flowing[static_cast<std::size_t>(lane.priority)] = members;
  lane.listed = members > 0;
  if (members > 0) {
    const Share share{port.bytes_per_second, members, false};
    lane.own = share;
    lane.meter.set_rate(share, late_ticks);
  }
  set_wake(id);
}

}  // namespace understudy
