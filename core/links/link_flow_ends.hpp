// Predicted ends of transfers: inline parts of LinkFlow that run at every event.
#pragma once

#include "links/link_flow.hpp"

namespace understudy {

// Returns the least share of these ports. On a port that serves demand first, background gets nothing while demand
// flows.
inline LinkFlow::Share LinkFlow::share(std::span<const PortId> ports, Priority priority) const {
  Share least;
  for (const PortId id : ports) {
    const Port& port = ports_[id];
    if (port.bytes_per_second == 0) continue;  // no limit
    const auto [demand, background] = port.flowing;
    Share here{port.bytes_per_second, std::max<std::uint64_t>(demand + background, 1), false};
    if (port.demand_first && demand > 0) {
      if (priority == Priority::Background) return {0, 1, false};
      here.sharers = demand;
    }
    if (least.unlimited || here.slower_than(least)) least = here;
  }
  return least;
}

// Divides 128 bits without the slow library call: where the quotient fits a word, a 53-bit guess plus a correction.
inline LinkFlow::Tick LinkFlow::rounded_up(Wide units, std::uint64_t bytes_per_second) {
  const double guess = as_double(units) / static_cast<double>(bytes_per_second);
  if (!(guess < 0x1p62)) return (units + bytes_per_second - 1) / bytes_per_second;
  const auto low = static_cast<std::uint64_t>(guess);
  const auto left = static_cast<std::int64_t>(units - Wide{low} * bytes_per_second);  // at most some thousands
  const auto divisor = static_cast<std::int64_t>(bytes_per_second);
  std::int64_t more = left / divisor;
  if (left - more * divisor > 0) ++more;
  return low + static_cast<std::uint64_t>(more);
}

// Rounds up; caches quotients, since most transfers have one of a few sizes.
inline LinkFlow::Tick LinkFlow::ticks_for(Wide units, std::uint64_t bytes_per_second) {
  Quotient& known = quotients_[static_cast<std::uint64_t>(units >> kTickBits) * 0x9E3779B97F4A7C15u >> 60];
  if (known.units != units || known.bytes_per_second != bytes_per_second) {
    known.units = units;
    known.bytes_per_second = bytes_per_second;
    known.ticks = rounded_up(units, bytes_per_second);
  }
  return known.ticks;
}

inline LinkFlow::Tick LinkFlow::wake_of(const Meter& meter, Wide ends_at, double lag, double& late_ticks) {
  if (!meter.rate.moves()) return kNever;
  const Wide left = ends_at > meter.served ? (ends_at - meter.served) * meter.rate.sharers : 0;
  Tick wake = meter.settled_at + ticks_for(left, meter.rate.bytes_per_second);
  late_ticks = lag == 0 ? 1 : lag / meter.units_per_tick + 1;
  const Tick past = wake & ((Tick{1} << kTickBits) - 1);
  const auto past_ticks = static_cast<double>(static_cast<std::uint64_t>(past));
  if (past_ticks <= late_ticks && wake - past >= meter.settled_at) {
    wake -= past;
    late_ticks -= past_ticks;
  }
  return wake;
}

inline void LinkFlow::set_wake(LaneId id) {
  Lane& lane = lanes_[id];
  Tick wake = kNever;
  if (!lane.members.empty()) {
    const Member& first = lane.members.top();
    wake = wake_of(lane.meter, first.ends_at, lane.meter.lag - first.lag, lane.late_ticks);
  }
  if (wake == lane.wake) return;
  ++operations_;
  lane.wake = wake;
  wake_at(false, id, wake);
}

inline void LinkFlow::wake_at(bool of_group, std::uint32_t number, Tick tick) {
  const std::uint32_t id = 2 * number + (of_group ? 1 : 0);
  if (tick == kNever) {
    wakes_.erase(id);
  } else {
    wakes_.set({tick, id});
  }
}

}  // namespace understudy
