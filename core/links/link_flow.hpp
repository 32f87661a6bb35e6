// Who moves how fast on the links of a run, and when each transfer ends. No accounting: see link.hpp.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <queue>
#include <set>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

namespace understudy {

using TransferId = std::uint64_t;

enum class Priority : std::uint8_t { Demand, Background };

struct Completion {
  std::int64_t time_ns = 0;
  TransferId id = 0;
  auto operator<=>(const Completion&) const = default;
};

// Processor sharing. A port is whatever has a bandwidth: a link, or the cap over both directions of one. A transfer
// crosses up to four ports and moves at the least of its fair shares. Transfers with the same ports and priority move
// at the same rate, so they form a lane, which counts the bytes served to each of its members since it was last empty:
// a transfer ends when that count reaches the count at its start plus its size. An event costs O(log n) and a visit to
// the other lanes of the same ports.
//
// Shares make thirds and sevenths whose exact fractions grow without end. Time inside is therefore counted in ticks of
// 2^-40 ns, rounded so that nothing is ever early, and each transfer knows how late its end may come at most for that:
// a few ticks, more after many shares. An end that is no further behind a whole nanosecond counts as being there; any
// other is rounded up to the next. State changes at events only, so that looking in between cannot change anything.
class LinkFlow {
 public:
  __extension__ using Wide = unsigned __int128;
  using PortId = std::uint32_t;
  using LaneId = std::uint32_t;
  using Tick = Wide;

  static constexpr unsigned kTickBits = 40;
  // So that 128 bits suffice: bytes of one transfer, and transfers at once.
  static constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 38;
  static constexpr std::uint64_t kMaxTransfers = std::uint64_t{1} << 19;
  static constexpr Tick tick_of(std::int64_t ns) { return static_cast<Tick>(ns) << kTickBits; }
  static constexpr std::int64_t ns_after(Tick tick) {  // the first whole nanosecond not before it
    return static_cast<std::int64_t>((tick + (Tick{1} << kTickBits) - 1) >> kTickBits);
  }

  struct Member {
    Wide ends_at = 0;  // in the lane's `served`
    TransferId id = 0;
    std::uint64_t bytes = 0;
    double lag = 0;  // of the lane when it joined
    auto operator<=>(const Member&) const = default;
  };
  struct Lane {
    std::array<PortId, 4> ports{};
    std::uint32_t num_ports = 0;
    std::array<std::uint32_t, 2> links{};
    std::uint32_t num_links = 0;
    Priority priority = Priority::Demand;
    std::uint64_t least_port = 0;        // bytes per second of its narrowest port; 0: none has a limit
    std::uint64_t bytes_per_second = 0;  // the rate of each member is this over `sharers`; 0: nothing moves
    std::uint64_t sharers = 1;
    Wide served = 0;  // to each member, in 10^-9 bytes * 2^-40, at `settled_at`
    Tick settled_at = 0;
    double lag = 0;            // the most by which rounding has kept `served` behind since the lane was empty
    std::optional<Tick> wake;  // when the first member ends, if nothing changes
    double late_ticks = 0;     // the most by which that is after its true end
    std::priority_queue<Member, std::vector<Member>, std::greater<>> members;
  };
  struct Port {
    std::uint64_t bytes_per_second = 0;  // 0: no limit
    bool demand_first = false;
    std::array<std::uint64_t, 2> flowing{};  // by priority
    std::vector<LaneId> lanes;
    Tick busy_ticks = 0;
    Tick busy_since = 0;
  };

  // Told of bytes as they move, and of ends.
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void moved(const Lane& lane, Tick from, Tick to, Wide units) = 0;
    virtual void ended(const Lane& lane, std::int64_t time_ns, std::uint64_t bytes) = 0;
  };

  PortId add_port(std::uint64_t bytes_per_second, bool demand_first);
  // The lane of these links (for the listener) and ports.
  LaneId lane(std::span<const std::uint32_t> links, std::span<const PortId> ports, Priority priority);

  // A transfer whose bytes start to flow at `flow_ns` >= `now_ns`, the time run to so far. Appends it if that is its
  // end.
  void start(std::int64_t now_ns, std::int64_t flow_ns, LaneId lane, TransferId id, std::uint64_t bytes,
             std::vector<Completion>& ended, Listener* listener);
  // Everything up to and including `now_ns`; appends what ended.
  void run_until(std::int64_t now_ns, std::vector<Completion>& ended, Listener* listener);
  // Until nothing is under way.
  void run_dry(std::vector<Completion>& ended);

  // When something next happens, and whether that is certainly an end.
  struct Next {
    std::int64_t time_ns = 0;
    bool is_end = false;
  };
  std::optional<Next> next() const;

  const Port& port(PortId id) const { return ports_[id]; }
  const Lane& lane_at(LaneId id) const { return lanes_[id]; }
  std::size_t under_way() const;  // flowing or about to
  std::uint64_t operations() const { return operations_; }
  // What a transfer takes alone, rounded up.
  static Wide alone_ns(const Lane& lane, std::uint64_t bytes) {
    if (lane.least_port == 0) return 0;
    // The product of a whole transfer most often fits a word, which divides far faster.
    const Wide rounded_up = Wide{bytes} * 1'000'000'000 + lane.least_port - 1;
    if (rounded_up >> 64 == 0) return static_cast<std::uint64_t>(rounded_up) / lane.least_port;
    return rounded_up / lane.least_port;
  }
  // What `lane` has moved since it was last settled, up to `now`.
  static Wide moving(const Lane& lane, Tick now);
  void check() const;

 private:
  struct Waiting {
    std::int64_t flow_ns = 0;
    TransferId id = 0;
    LaneId lane = 0;
    std::uint64_t bytes = 0;
    auto operator<=>(const Waiting&) const = default;
  };

  void run_until_tick(Tick end, std::vector<Completion>& ended, Listener* listener);
  void join(LaneId id, Tick now, TransferId transfer, std::uint64_t bytes, std::vector<Completion>& ended,
            Listener* listener);
  void leave(LaneId id, Tick now, std::vector<Completion>& ended, Listener* listener);
  void settle(Lane& lane, Tick now, Listener* listener);
  void reshare(LaneId changed, Tick now, double late_ticks, Listener* listener);
  std::pair<std::uint64_t, std::uint64_t> share(const Lane& lane) const;
  void set_wake(LaneId id);
  Tick ticks_for(Wide units, std::uint64_t bytes_per_second);

  std::vector<Port> ports_;
  std::vector<Lane> lanes_;
  struct Wake {
    Tick tick = 0;
    LaneId lane = 0;
    bool operator>(const Wake& other) const { return std::tie(tick, lane) > std::tie(other.tick, other.lane); }
  };
  void forget_old_wakes();
  std::size_t max_wakes() const noexcept { return 2 * lanes_.size() + 64; }

  // The first is a lane's wake, if any lane has one; behind it there may be some that were given up.
  std::priority_queue<Wake, std::vector<Wake>, std::greater<>> wakes_;
  std::set<Waiting> waiting_;
  struct Quotient {
    Wide units = 0;
    std::uint64_t bytes_per_second = 0;
    Tick ticks = 0;
  };
  std::array<Quotient, 16> quotients_{};  // that were worked out lately
  std::uint64_t operations_ = 0;
};

}  // namespace understudy
