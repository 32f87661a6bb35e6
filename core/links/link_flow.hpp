// Who moves how fast on the links of a run, and when each transfer ends. No accounting: see link.hpp.
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

// Processor sharing. A port is whatever has a bandwidth: a link, or the cap over both directions of one. A transfer
// crosses up to four ports and moves at the least of its fair shares. Transfers with the same ports and priority move
// at the same rate, so they form a lane, which counts the bytes served to each of its members since it was last empty:
// a transfer ends when that count reaches the count at its start plus its size.
//
// Many lanes, one a worker, may end in the same ports: a backend's. They form a group. Those of them that the backend
// holds back, more than their own ports do, all move at its share, so one count serves them all, and a change of that
// share costs nobody a visit but the few whose own ports are now the narrower ones, or no longer. An event costs
// O(log n) for each port that it crosses.
//
// Shares make thirds and sevenths whose exact fractions grow without end. Time inside is therefore counted in ticks of
// 2^-40 ns, rounded so that nothing is ever early, and each transfer knows how late its end may come at most for that:
// a few ticks, more after many shares. An end that is no further behind a whole nanosecond counts as being there; any
// other is rounded up to the next. State changes at events only, so that looking in between cannot change anything.
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
  // So that 128 bits suffice: bytes of one transfer, and transfers at once.
  static constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 38;
  static constexpr std::uint64_t kMaxTransfers = std::uint64_t{1} << 19;
  static constexpr Wide kUnitsPerByte = Wide{1'000'000'000} << kTickBits;
  static constexpr Tick tick_of(std::int64_t ns) { return static_cast<Tick>(ns) << kTickBits; }
  static constexpr std::int64_t ns_after(Tick tick) {  // the first whole nanosecond not before it
    return static_cast<std::int64_t>((tick + (Tick{1} << kTickBits) - 1) >> kTickBits);
  }

  struct Member {
    Wide ends_at = 0;  // in the lane's count
    TransferId id = 0;
    std::uint64_t bytes = 0;
    double lag = 0;  // of the lane when it joined
    Member(Wide ends_at_, TransferId id_, std::uint64_t bytes_, double lag_) noexcept
        : ends_at(ends_at_), id(id_), bytes(bytes_), lag(lag_) {}
    bool operator>(const Member& other) const noexcept {
      return ends_at != other.ends_at ? ends_at > other.ends_at : id > other.id;
    }
  };
  // A heap of them, the next to end on top.
  class Members {
   public:
    bool empty() const noexcept { return heap_.empty(); }
    std::size_t size() const noexcept { return heap_.size(); }
    const Member& top() const noexcept { return heap_.front(); }
    void push(Wide ends_at, TransferId id, std::uint64_t bytes, double lag) {
      heap_.emplace_back(ends_at, id, bytes, lag);
      // Most often the last to come is the last to end.
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
    std::uint32_t num_own = 0;  // the first of them; the rest are its group's
    std::array<std::uint32_t, 2> links{};
    std::uint32_t num_links = 0;
    Priority priority = Priority::Demand;
    GroupId group = kNoGroup;
    std::uint64_t least_port = 0;  // bytes per second that its narrowest port was made with; 0: none has a limit
    Share own;                     // of its own ports
    bool alone = false;            // nobody else can be on its port: its members share that by their number
    bool listed = false;           // in its group, with a rate
    bool held_back = false;        // by its group's ports, whose meter counts for it
    Meter meter;                   // its own; while it is held back, as of when it was last looked at
    Wide base = 0;                 // held back: the group's count less the lane's
    double lag_base = 0;           // the lane's lag less the group's
    Tick wake = kNever;            // when the first member ends, if nothing changes, unless held back
    double late_ticks = 0;         // the most by which that is after its true end
    Members members;
  };
  struct ByRate {
    Share own;
    LaneId id = 0;
    ByRate() = default;
    ByRate(const Share& own_, LaneId id_) noexcept : own(own_), id(id_) {}
    ByRate(const ByRate& other) noexcept : own(other.own), id(other.id) {}
    ByRate& operator=(const ByRate& other) noexcept {  // part by part, as Wake below
      own.bytes_per_second = other.own.bytes_per_second;
      own.sharers = other.own.sharers;
      own.unlimited = other.own.unlimited;
      id = other.id;
      return *this;
    }
    bool operator<(const ByRate& other) const noexcept {  // the slowest first
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
    std::uint32_t link = 0;  // for the listener
    Priority priority = Priority::Demand;
    Meter meter;                                    // of those held back
    PlacedHeap<ByRate> held_back;                   // the slowest on top
    PlacedHeap<ByRate, std::greater<ByRate>> free;  // moving at their own share; the fastest on top
    PlacedHeap<ByEnd> by_end;                       // of lanes held back: who has its next end first
    std::uint64_t members = 0;                      // of lanes held back
    Tick wake = kNever;
    double late_ticks = 0;
  };
  struct Port {
    std::uint64_t bytes_per_second = 0;  // 0: no limit
    std::uint64_t made_with = 0;         // the same, whatever it was slowed to since
    bool demand_first = false;
    std::array<std::uint64_t, 2> flowing{};  // by priority
    std::vector<LaneId> lanes;               // that have it for their own
    std::vector<GroupId> groups;
    Tick busy_ticks = 0;
    Tick busy_since = 0;
  };

  // Told of bytes as they move, and of ends.
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void moved(std::uint32_t link, Tick from, Tick to, Wide units) = 0;
    virtual void ended(const Lane& lane, std::int64_t time_ns, std::uint64_t bytes) = 0;
  };

  PortId add_port(std::uint64_t bytes_per_second, bool demand_first);
  // Another bandwidth from `now` on, the time run to so far. A port with a limit keeps one.
  void set_bandwidth(PortId id, std::uint64_t bytes_per_second, Tick now, Listener* listener);
  // The lane of these links (for the listener), one or two, with the ports of each.
  LaneId lane(std::span<const std::uint32_t> links, std::span<const PortId> own, std::span<const PortId> common,
              Priority priority);

  // Transfers numbered from `first` on, whose bytes start to flow at `flow_ns` >= `now_ns`, the time run to so far.
  // Appends those whose end that is.
  void start(std::int64_t now_ns, std::int64_t flow_ns, LaneId lane, TransferId first,
             std::span<const std::uint64_t> bytes, std::vector<Completion>& ended, Listener* listener);
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
  // Its time alone; kNeverNs: never.
  static constexpr std::int64_t kNeverNs = std::numeric_limits<std::int64_t>::max();
  std::int64_t next_ns() const {
    const std::int64_t flows_ns = waiting_.empty() ? kNeverNs : waiting_.begin()->flow_ns;
    return wakes_.empty() ? flows_ns : std::min(flows_ns, ns_after(wakes_.top().tick));
  }

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
  // Tells what has moved on `link`, whose port is `port`, and was not told yet, up to `now`.
  void tell_moving(std::uint32_t link, PortId port, Tick now, Listener& listener) const;
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
  // The next end of a lane or a group. Of ends at one time lanes come before groups, and then by number.
  struct Wake {
    Tick tick = 0;
    std::uint32_t id = 0;  // twice the number, and one for a group
    Wake() = default;
    Wake(Tick tick_, std::uint32_t id_) noexcept : tick(tick_), id(id_) {}
    Wake(const Wake& other) noexcept : tick(other.tick), id(other.id) {}
    Wake& operator=(const Wake& other) noexcept {  // field by field: as a block it waits for the fields to be written
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
  std::array<Quotient, 16> quotients_{};  // that were worked out lately
  std::uint64_t operations_ = 0;
};

}  // namespace understudy
