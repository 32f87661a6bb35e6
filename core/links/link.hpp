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

// The links of one run. A transfer waits for the fixed cost of its path, then moves at the least of its fair shares of
// one or two links (a worker's and a backend's) and of the duplex cap above each, until its last byte. Completion times
// are exact, rounded up to a nanosecond, and do not depend on when they are read.
class Links {
 public:
  // Throws ConfigError with the link's name.
  DuplexId add_duplex(const std::string& name, double bandwidth_gbps, bool demand_first = false);
  LinkId add_link(const LinkSpec& spec);
  // Scales the link's bandwidth to `share` (kLeastShare to 1) from now on, also for transfers in flight. Throws
  // InvalidArgument for another share, an unlimited link, or when the transfers in flight would take years.
  void set_share(std::int64_t now_ns, LinkId id, double share);
  void set_duplex_share(std::int64_t now_ns, DuplexId id, double share);  // the same for a duplex cap
  static constexpr double kLeastShare = 1e-3;
  // Limit on the backlog (nine years): the sum of the times that each transfer in flight would take alone. Keeps times
  // far from the end of int64, also where links that serve demand first meet links that do not.
  static constexpr std::int64_t kMostNs = std::int64_t{1} << 58;
  bool has_limit(LinkId id) const { return flow_.port(links_[id].port).bytes_per_second > 0; }
  std::optional<DuplexId> duplex_of(LinkId id) const { return links_[id].duplex; }

  // Starts a transfer over one or two links; ids increase in order of start. Throws InvalidArgument for a time in the
  // past.
  TransferId start(std::int64_t now_ns, std::span<const LinkId> path, std::uint64_t bytes,
                   Priority priority = Priority::Demand);
  // Starts one transfer per element of `bytes`, in order, all or none; returns the id of the first.
  TransferId start_all(std::int64_t now_ns, std::span<const LinkId> path, std::span<const std::uint64_t> bytes,
                       Priority priority);
  // When pop_due next returns something if no transfer starts before: now, or the next end. Exact; costs a lookahead
  // while a fixed cost is running.
  std::optional<std::int64_t> next_completion_ns() const;
  // Cheaper lower bound of the next completion, not before now. pop_due at that time may return nothing.
  std::optional<std::int64_t> next_wake_ns() const;
  std::int64_t next_wake_or_never_ns() const {
    return ended_.empty() ? flow_.next_ns() : now_ns_;
  }  // kNeverNs: no transfer
  // Returns the transfers that ended up to and including `now_ns`, each once, by time and then by start.
  std::vector<Completion> pop_due(std::int64_t now_ns);
  void pop_due(std::int64_t now_ns, std::vector<Completion>& due);  // replaces the content of `due`
  // End time of a transfer that was not popped yet, if none starts before. The first call after a start predicts all
  // ends; later calls read the prediction.
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
    std::array<std::optional<LinkFlow::LaneId>, 2> alone;  // by priority: lane of transfers over this link only
    std::array<std::optional<Paired>, 2> paired;  // by priority: lane over this link and another, the one used last
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
  const std::vector<Completion>& predict_ends() const;

  LinkFlow flow_;
  std::vector<Link> links_;
  std::vector<Duplex> duplexes_;
  std::int64_t now_ns_ = 0;
  TransferId next_id_ = 0;
  std::size_t in_flight_ = 0;
  // Sum of the times that each transfer in flight would take alone, on links that were never slowed.
  LinkFlow::Wide backlog_ns_ = 0;
  std::vector<double> shares_;        // of its bandwidth, by port
  double least_share_ = 1;            // minimum of shares_
  std::vector<std::uint8_t> orders_;  // by port: 1 shares among all, 2 serves demand first, 0 has no limit
  bool mixed_ = false;                // a transfer has crossed ports of both orders
  std::vector<Completion> ended_;     // not popped yet
  // Predicted ends of all transfers in flight, in order; valid until the next start.
  mutable std::optional<std::vector<Completion>> predicted_;
  mutable std::unordered_map<TransferId, std::int64_t> predicted_of_;
};

}  // namespace understudy
