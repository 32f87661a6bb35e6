// Rates of the transfers on the links of a run, and when each transfer ends. Usage accounting is in link.hpp.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <set>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "base/placed_heap.hpp"
#include "links/link_meter.hpp"

namespace understudy {

using TransferId = std::uint64_t;

enum class Priority : std::uint8_t { Demand, Background };

struct Completion {
  std::int64_t time_ns = 0;
  TransferId id = 0;
  auto operator<=>(const Completion&) const = default;
};

// Processor sharing. A port is anything with a bandwidth: a link, or the cap over both directions of one. A transfer
// crosses up to four ports and moves at the least of its fair shares. Transfers with equal ports and priority move at
// the same rate and form a lane, which counts the bytes served to each member since it was last empty: a transfer ends
// when that count reaches the count at its start plus its size.
//
// Lanes of many workers may share the ports of one backend; they form a group. Lanes for which the group's share is the
// bottleneck (held back) all move at that share, so one meter serves them all, and a change of the share visits only
// lanes whose bottleneck changes. An event costs O(log n) per port that it crosses.
//
// Exact fractions of repeated shares would grow without bound, so time is counted in ticks of 2^-40 ns, rounded so that
// nothing is early, with a bound on each transfer's lateness. An end within that bound after a whole nanosecond counts
// as that nanosecond; others are rounded up. State changes at events only, so reads in between change nothing.
class LinkFlow {
 public:
  using Wide = LinkShare::Wide;
  using Share = LinkShare;
  using Meter = LinkMeter;
  using PortId = std::uint32_t;
  using LaneId = std::uint32_t;
  using GroupId = std::uint32_t;
  using Tick = Wide;

  static constexpr unsigned kTickBits = 40;
  static constexpr GroupId kNoGroup = 0xFFFFFFFFu;
  static constexpr Tick kNever = ~Tick{0};
  // Limits that keep all products within 128 bits: bytes of one transfer, and transfers at once.
  static constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 38;
  static constexpr std::uint64_t kMaxTransfers = std::uint64_t{1} << 19;
  static constexpr Wide kUnitsPerByte = Wide{1'000'000'000} << kTickBits;
  static constexpr Tick tick_of(std::int64_t ns) { return static_cast<Tick>(ns) << kTickBits; }
  static constexpr std::int64_t ns_after(Tick tick) {  // rounds up to a whole nanosecond
    return static_cast<std::int64_t>((tick + (Tick{1} << kTickBits) - 1) >> kTickBits);
  }

  struct Member {
    Wide ends_at = 0;  // in the lane's count of bytes served
    TransferId id = 0;
    std::uint64_t bytes = 0;
    double lag = 0;  // lag of the lane when the transfer joined
    Member(Wide ends_at_, TransferId id_, std::uint64_t bytes_, double lag_) noexcept
        : ends_at(ends_at_), id(id_), bytes(bytes_), lag(lag_) {}
    bool operator>(const Member& other) const noexcept {
      return ends_at != other.ends_at ? ends_at > other.ends_at : id > other.id;
    }
  };
  // Heap of members, the next to end on top.
  class Members {
   public:
    bool empty() const noexcept { return heap_.empty(); }
    std::size_t size() const noexcept { return heap_.size(); }
    const Member& top() const noexcept { return heap_.front(); }
    void push(Wide ends_at, TransferId id, std::uint64_t bytes, double lag) {
      heap_.emplace_back(ends_at, id, bytes, lag);
      // The last to join is usually the last to end.
      if (heap_.size() > 1 && heap_[(heap_.size() - 2) / 2] > heap_.back())
        std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
    }
    void pop() {
      if (heap_.size() > 1) std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
      heap_.pop_back();
    }

   private:
    std::vector<Member> heap_;
  };
  struct Lane {
    std::array<PortId, 4> ports{};
    std::uint32_t num_ports = 0;
    std::uint32_t num_own = 0;  // leading ports that are its own; the others belong to its group
    std::array<std::uint32_t, 2> links{};
    std::uint32_t num_links = 0;
    Priority priority = Priority::Demand;
    GroupId group = kNoGroup;
    std::uint64_t least_port = 0;  // original bytes per second of its narrowest port; 0: no port has a limit
    Share own;                     // share of its own ports
    bool alone = false;            // only user of its port: its members share it equally
    bool listed = false;           // has a rate, and is in its group
    bool held_back = false;        // the group's share is the bottleneck; the group's meter counts for it
    Meter meter;                   // its own meter; while held back, as of its last update
    Wide base = 0;                 // held back: the group's count minus the lane's
    double lag_base = 0;           // the lane's lag minus the group's
    Tick wake = kNever;            // predicted end of the first member, unless held back
    double late_ticks = 0;         // bound on how late `wake` may be
    Members members;
  };
  struct ByRate {
    Share own;
    LaneId id = 0;
    ByRate() = default;
    ByRate(const Share& own_, LaneId id_) noexcept : own(own_), id(id_) {}
    ByRate(const ByRate& other) noexcept : own(other.own), id(other.id) {}
    ByRate& operator=(const ByRate& other) noexcept {  // field by field, as in Wake below
      own.bytes_per_second = other.own.bytes_per_second;
      own.sharers = other.own.sharers;
      own.unlimited = other.own.unlimited;
      id = other.id;
      return *this;
    }
    bool operator<(const ByRate& other) const noexcept {  // slowest first
      if (own.slower_than(other.own)) return true;
      if (other.own.slower_than(own)) return false;
      return id < other.id;
    }
    bool operator>(const ByRate& other) const noexcept { return other < *this; }
  };
  struct ByEnd {
    Wide ends_at = 0;  // in the group's count
    LaneId id = 0;
    bool operator<(const ByEnd& other) const noexcept {
      return ends_at != other.ends_at ? ends_at < other.ends_at : id < other.id;
    }
  };
  struct Group {
    std::array<PortId, 2> ports{};
    std::uint32_t num_ports = 0;
    std::uint32_t link = 0;  // link reported to the listener
    Priority priority = Priority::Demand;
    Meter meter;                                    // of the lanes held back
    PlacedHeap<ByRate> held_back;                   // slowest on top
    PlacedHeap<ByRate, std::greater<ByRate>> free;  // moving at their own share; fastest on top
    PlacedHeap<ByEnd> by_end;                       // lanes held back, by their next end
    std::uint64_t members = 0;                      // members of the lanes held back
    Tick wake = kNever;
    double late_ticks = 0;
  };
  struct Port {
    std::uint64_t bytes_per_second = 0;  // 0: no limit
    std::uint64_t made_with = 0;         // bytes per second before it was slowed
    bool demand_first = false;
    std::array<std::uint64_t, 2> flowing{};  // by priority
    std::vector<LaneId> lanes;               // lanes that own this port
    std::vector<GroupId> groups;
    Tick busy_ticks = 0;
    Tick busy_since = 0;
  };

  // Receives bytes as they move, and ends.
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void moved(std::uint32_t link, Tick from, Tick to, Wide units) = 0;
    virtual void ended(const Lane& lane, std::int64_t time_ns, std::uint64_t bytes) = 0;
  };

  PortId add_port(std::uint64_t bytes_per_second, bool demand_first);
  // Changes the bandwidth from `now` (the time run to so far) on. A port with a limit keeps one.
  void set_bandwidth(PortId id, std::uint64_t bytes_per_second, Tick now, Listener* listener);
  // Returns the lane of one or two links (for the listener) with the ports of each.
  LaneId lane(std::span<const std::uint32_t> links, std::span<const PortId> own, std::span<const PortId> common,
              Priority priority);

  // Starts transfers numbered from `first` on, whose bytes flow from `flow_ns` >= `now_ns` (the time run to so far).
  // Appends those that end at once.
  void start(std::int64_t now_ns, std::int64_t flow_ns, LaneId lane, TransferId first,
             std::span<const std::uint64_t> bytes, std::vector<Completion>& ended, Listener* listener);
  // Processes all events up to and including `now_ns`; appends the ends.
  void run_until(std::int64_t now_ns, std::vector<Completion>& ended, Listener* listener);
  // Runs until no transfer is in flight.
  void run_dry(std::vector<Completion>& ended);

  // Time of the next event, and whether it is certainly an end.
  struct Next {
    std::int64_t time_ns = 0;
    bool is_end = false;
  };
  std::optional<Next> next() const;
  // Time of the next event; kNeverNs: none.
  static constexpr std::int64_t kNeverNs = std::numeric_limits<std::int64_t>::max();
  std::int64_t next_ns() const {
    const std::int64_t flows_ns = waiting_.empty() ? kNeverNs : waiting_.begin()->flow_ns;
    return wakes_.empty() ? flows_ns : std::min(flows_ns, ns_after(wakes_.top().tick));
  }

  const Port& port(PortId id) const { return ports_[id]; }
  const Lane& lane_at(LaneId id) const { return lanes_[id]; }
  std::size_t under_way() const;  // flowing or waiting for their fixed cost
  std::uint64_t operations() const { return operations_; }
  // Duration of a transfer without competition, rounded up.
  static Wide alone_ns(const Lane& lane, std::uint64_t bytes) {
    if (lane.least_port == 0) return 0;
    // Most products fit 64 bits, which divide far faster.
    const Wide rounded_up = Wide{bytes} * 1'000'000'000 + lane.least_port - 1;
    if (rounded_up >> 64 == 0) return static_cast<std::uint64_t>(rounded_up) / lane.least_port;
    return rounded_up / lane.least_port;
  }
  // Reports what has moved on `link` (port `port`) up to `now` and was not reported yet.
  void report_moving(std::uint32_t link, PortId port, Tick now, Listener& listener) const;
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
  void leave(LaneId id, Tick now, double late_ticks, std::vector<Completion>& ended, Listener* listener);
  void count(const Lane& lane, Tick now, bool more);
  void reshare(LaneId changed, Tick now, double late_ticks, Listener* listener);
  Share share(std::span<const PortId> ports, Priority priority) const;
  void join_alone(LaneId id, Tick now, TransferId first, std::span<const std::uint64_t> bytes,
                  std::vector<Completion>& ended, Listener* listener);
  void leave_alone(LaneId id, Tick now, double late_ticks, std::vector<Completion>& ended, Listener* listener);
  void settle_alone(Lane& lane, Tick now, Listener* listener);
  void reshare_alone(LaneId id, Port& port, double late_ticks);
  std::span<const PortId> own_ports(const Lane& lane) const { return std::span(lane.ports).first(lane.num_own); }
  std::span<const PortId> ports_of(const Group& group) const { return std::span(group.ports).first(group.num_ports); }

  void settle(Lane& lane, Tick now, Listener* listener);
  void settle(Group& group, Tick now, Listener* listener);
  void update(LaneId id, Tick now, double late_ticks, Listener* listener);
  bool update(Group& group, Tick now, double late_ticks, Listener* listener);
  void enlist(LaneId id, Tick now, double late_ticks, Listener* listener);
  void withdraw(LaneId id, Tick now, Listener* listener);
  void hold_back(LaneId id, Group& group);
  void stop_holding_back(LaneId id, Group& group);
  double lag_of(const Lane& lane) const;

  void set_wake(LaneId id);
  void set_wake(Group& group);
  Tick wake_of(const Meter& meter, Wide ends_at, double lag, double& late_ticks);
  void wake_at(bool of_group, std::uint32_t number, Tick tick);
  static Tick rounded_up(Wide units, std::uint64_t bytes_per_second);
  Tick ticks_for(Wide units, std::uint64_t bytes_per_second);

  std::vector<Port> ports_;
  std::vector<Lane> lanes_;
  std::vector<Group> groups_;
  // The next end of a lane or a group. At equal times lanes come before groups, then by number.
  struct Wake {
    Tick tick = 0;
    std::uint32_t id = 0;  // twice the number, plus one for a group
    Wake() = default;
    Wake(Tick tick_, std::uint32_t id_) noexcept : tick(tick_), id(id_) {}
    Wake(const Wake& other) noexcept : tick(other.tick), id(other.id) {}
    Wake& operator=(const Wake& other) noexcept {  // field by field: a block copy would stall on the pending stores
      tick = other.tick;
      id = other.id;
      return *this;
    }
    bool of_group() const noexcept { return (id & 1) != 0; }
    std::uint32_t number() const noexcept { return id >> 1; }
    bool operator<(const Wake& other) const noexcept {
      return tick != other.tick ? tick < other.tick : std::rotr(id, 1) < std::rotr(other.id, 1);
    }
  };
  PlacedHeap<Wake> wakes_;
  std::set<Waiting> waiting_;
  struct Quotient {
    Wide units = 0;
    std::uint64_t bytes_per_second = 0;
    Tick ticks = 0;
  };
  std::array<Quotient, 16> quotients_{};  // recently computed
  std::uint64_t operations_ = 0;
};

}  // namespace understudy
