// Links: bandwidth that transfers share.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "links/link_flow.hpp"
#include "links/link_usage.hpp"

namespace understudy {

using LinkId = std::uint32_t;
using DuplexId = std::uint32_t;

struct LinkSpec {
  std::string name;
  double bandwidth_gbps = 0;       // 10^9 bytes per second, whole bytes; infinity: no limit
  std::int64_t fixed_ns = 0;       // from a transfer's start until its bytes flow
  std::optional<DuplexId> duplex;  // the cap that both directions share
  bool demand_first = false;       // background transfers move only while no demand transfer flows
};

// The links of one run. A transfer waits for the fixed cost of its path and then moves at the least of its fair
// shares: of one link or of two (a worker's and a backend's), and of the duplex cap above each. It keeps its share
// until its last byte. Completion times are exact, rounded up to a nanosecond, and do not depend on when one looks.
class Links {
 public:
  // ConfigError names the link and what is wrong.
  DuplexId add_duplex(const std::string& name, double bandwidth_gbps, bool demand_first = false);
  LinkId add_link(const LinkSpec& spec);
  // From now on the link has this share of its bandwidth, from kLeastShare to 1; what is under way slows down with it.
  // InvalidArgument for another share, when the link has no limit, or when what is under way would take years.
  void set_share(std::int64_t now_ns, LinkId id, double share);
  void set_duplex_share(std::int64_t now_ns, DuplexId id, double share);  // the same of a cap
  static constexpr double kLeastShare = 1e-3;
  // Nine years: what all that is under way would take alone, together, so that times stay far from the end of int64.
  // Where links that serve demand first meet others that do not, as many times that as there are transfers.
  static constexpr std::int64_t kMostNs = std::int64_t{1} << 58;
  bool has_limit(LinkId id) const { return flow_.port(links_[id].port).bytes_per_second > 0; }
  std::optional<DuplexId> duplex_of(LinkId id) const { return links_[id].duplex; }

  // Starts a transfer over one or two links; ids rise in order of start. Time never goes backwards (InvalidArgument).
  TransferId start(std::int64_t now_ns, std::span<const LinkId> path, std::uint64_t bytes,
                   Priority priority = Priority::Demand);
  // As many, one after the other; returns the id of the first. All of them or none.
  TransferId start_all(std::int64_t now_ns, std::span<const LinkId> path, std::span<const std::uint64_t> bytes,
                       Priority priority);
  // When pop_due next has something to return if no transfer starts before: now, or the next end. Exact; costs a look
  // ahead while a fixed cost is running.
  std::optional<std::int64_t> next_completion_ns() const;
  // Cheaper: a time not after the next completion, and not before now. pop_due at that time may return nothing.
  std::optional<std::int64_t> next_wake_ns() const;
  std::int64_t next_wake_or_never_ns() const { return ended_.empty() ? flow_.next_ns() : now_ns_; }  // kNeverNs: none
  // What ended up to and including `now_ns`, each once, by time and then by start.
  std::vector<Completion> pop_due(std::int64_t now_ns);
  void pop_due(std::int64_t now_ns, std::vector<Completion>& due);  // the same, in place of what `due` held
  // When a transfer that was not popped yet ends if none starts before. The first call after a start looks ahead until
  // all links are idle, those after it read the answer.
  std::int64_t deadline_ns(TransferId id) const;

  std::size_t num_links() const { return links_.size(); }
  std::int64_t now_ns() const { return now_ns_; }
  bool idle() const { return in_flight_ == 0 && ended_.empty(); }  // nothing under way, nothing to pop
  std::size_t in_flight() const { return in_flight_; }
  LinkUsage usage(LinkId id) const;  // up to now
  std::uint64_t operations() const { return flow_.operations(); }
  void check() const;  // InvariantViolated

 private:
  class Ledger final : public LinkFlow::Listener {
   public:
    explicit Ledger(Links& links) : links_(links) {}
    void moved(LinkId link, LinkFlow::Tick from, LinkFlow::Tick to, LinkFlow::Wide units) override;
    void ended(const LinkFlow::Lane& lane, std::int64_t time_ns, std::uint64_t bytes) override;

   private:
    Links& links_;
  };
  struct Link {
    LinkFlow::PortId port = 0;
    std::int64_t fixed_ns = 0;
    std::optional<DuplexId> duplex;
    struct Paired {
      LinkId with;
      LinkFlow::LaneId lane;
    };
    std::array<std::optional<LinkFlow::LaneId>, 2> alone;  // by priority: of transfers over this link only
    std::array<std::optional<Paired>, 2> paired;           // the same over this one and another, the last that was
    LinkUsage usage;
  };

  struct Duplex {
    LinkFlow::PortId port = 0;
    std::string name;
    double bandwidth_gbps = 0;
  };

  void lower(std::int64_t now_ns, LinkFlow::PortId port, const std::string& what, double bandwidth_gbps, double share);
  LinkFlow::LaneId lane_of(std::span<const LinkId> path, Priority priority);
  Links as_of(std::int64_t now_ns) const;
  void advance(std::int64_t now_ns);
  LinkFlow::PortId add_port(std::uint64_t bytes_per_second, bool demand_first);
  bool takes_years(LinkFlow::Wide backlog_ns, std::size_t in_flight, double least_share) const;
  const std::vector<Completion>& forecast() const;

  LinkFlow flow_;
  std::vector<Link> links_;
  std::vector<Duplex> duplexes_;
  std::int64_t now_ns_ = 0;
  TransferId next_id_ = 0;
  std::size_t in_flight_ = 0;
  // What each transfer under way would take alone, together, on links that were never slowed.
  LinkFlow::Wide backlog_ns_ = 0;
  std::vector<double> shares_;        // that ports have of their bandwidth
  double least_share_ = 1;            // of them
  std::vector<std::uint8_t> orders_;  // of ports: 1 shares among all, 2 serves demand first; 0 has no limit
  bool mixed_ = false;                // a transfer has crossed ports of both orders
  std::vector<Completion> ended_;     // not popped yet
  // Ends of all that is under way, in order; good until the next start.
  mutable std::optional<std::vector<Completion>> forecast_;
  mutable std::unordered_map<TransferId, std::int64_t> forecast_of_;
};

}  // namespace understudy
