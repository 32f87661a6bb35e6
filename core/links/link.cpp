#include "links/link.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "base/assert.hpp"
#include "base/errors.hpp"

namespace understudy {

namespace {

constexpr double kMaxGbps = 1e6;

// Returns whole bytes per second; 0 means no limit.
std::uint64_t bytes_per_second(const std::string& what, double gbps) {
  if (gbps == std::numeric_limits<double>::infinity()) return 0;
  if (gbps == 0) {
    throw Error(ErrorKind::ConfigError, what,
                ": bandwidth_gbps must be positive, got 0; for no limit say inf (Dynamo reads 0 as unlimited)");
  }
  if (!(gbps >= 1e-9) || gbps > kMaxGbps) {
    throw Error(ErrorKind::ConfigError, what, ": bandwidth_gbps must be from 1e-9 to ", kMaxGbps,
                " (10^9 bytes per second) or inf, got ", gbps);
  }
  return static_cast<std::uint64_t>(std::llround(gbps * 1e9));
}

constexpr double kNsPerTick = 1.0 / static_cast<double>(std::uint64_t{1} << LinkFlow::kTickBits);

double bytes_of(LinkFlow::Wide units) { return as_double(units) * kNsPerTick / 1e9; }
// Converts whole and fractional nanoseconds separately, so that no precision is lost.
double ns_of(LinkFlow::Tick tick) {
  const std::uint64_t part = static_cast<std::uint64_t>(tick) & ((std::uint64_t{1} << LinkFlow::kTickBits) - 1);
  return static_cast<double>(static_cast<std::uint64_t>(tick >> LinkFlow::kTickBits)) +
         static_cast<double>(part) * kNsPerTick;
}

}  // namespace

DuplexId Links::add_duplex(const std::string& name, double bandwidth_gbps, bool demand_first) {
  const std::uint64_t most = bytes_per_second("duplex " + name, bandwidth_gbps);
  duplexes_.push_back({add_port(most, demand_first), name, bandwidth_gbps});
  return static_cast<DuplexId>(duplexes_.size() - 1);
}

LinkId Links::add_link(const LinkSpec& spec) {
  if (spec.fixed_ns < 0)
    throw Error(ErrorKind::ConfigError, "link ", spec.name, ": fixed_ns must not be negative, got ", spec.fixed_ns);
  if (spec.fixed_ns > kMostNs) {
    throw Error(ErrorKind::ConfigError, "link ", spec.name, ": fixed_ns must be at most 2^58 (nine years), got ",
                spec.fixed_ns);
  }
  if (spec.duplex && *spec.duplex >= duplexes_.size())
    throw Error(ErrorKind::ConfigError, "link ", spec.name, ": there is no duplex ", *spec.duplex);
  Link link;
  link.port = add_port(bytes_per_second("link " + spec.name, spec.bandwidth_gbps), spec.demand_first);
  link.fixed_ns = spec.fixed_ns;
  link.duplex = spec.duplex;
  link.usage.name = spec.name;
  link.usage.bandwidth_gbps = spec.bandwidth_gbps;
  links_.push_back(std::move(link));
  return static_cast<LinkId>(links_.size() - 1);
}

LinkFlow::PortId Links::add_port(std::uint64_t bytes_per_second, bool demand_first) {
  orders_.push_back(bytes_per_second == 0 ? 0 : demand_first ? 2 : 1);
  shares_.push_back(1);
  return flow_.add_port(bytes_per_second, demand_first);
}

void Links::set_share(std::int64_t now_ns, LinkId id, double share) {
  if (id >= links_.size()) throw Error(ErrorKind::InvalidArgument, "there is no link ", id);
  lower(now_ns, links_[id].port, "link " + links_[id].usage.name, links_[id].usage.bandwidth_gbps, share);
}

void Links::set_duplex_share(std::int64_t now_ns, DuplexId id, double share) {
  if (id >= duplexes_.size()) throw Error(ErrorKind::InvalidArgument, "there is no duplex ", id);
  lower(now_ns, duplexes_[id].port, "duplex " + duplexes_[id].name, duplexes_[id].bandwidth_gbps, share);
}

void Links::lower(std::int64_t now_ns, LinkFlow::PortId port, const std::string& what, double bandwidth_gbps,
                  double share) {
  if (!(share >= kLeastShare && share <= 1)) {
    throw Error(ErrorKind::InvalidArgument, what, ": a share of its bandwidth is from ", kLeastShare, " to 1, got ",
                share);
  }
  const std::uint64_t usual = bytes_per_second(what, bandwidth_gbps);
  if (usual == 0) throw Error(ErrorKind::InvalidArgument, what, " has no limit that could be lowered");
  double least_share = share;
  for (LinkFlow::PortId other = 0; other < shares_.size(); ++other) {
    if (other != port) least_share = std::min(least_share, shares_[other]);
  }
  const auto too_slow = [&](const Links& links) {
    return links.takes_years(links.backlog_ns_, links.in_flight_, least_share);
  };
  if (too_slow(*this) && too_slow(as_of(now_ns)))
    throw Error(ErrorKind::InvalidArgument, what, ": the transfers in flight would take years; give a larger share");
  advance(now_ns);
  shares_[port] = share;
  least_share_ = least_share;
  const auto lowered = static_cast<std::uint64_t>(static_cast<double>(usual) * share);
  predicted_.reset();
  Ledger ledger(*this);
  flow_.set_bandwidth(port, share == 1 ? usual : std::max<std::uint64_t>(lowered, 1), LinkFlow::tick_of(now_ns),
                      &ledger);
}

// Lower shares make a backlog longer. So does a transfer that occupies a share of one link while it waits for demand on
// another (mixed_): at worst, all transfers move one after the other.
bool Links::takes_years(LinkFlow::Wide backlog_ns, std::size_t in_flight, double least_share) const {
  if (backlog_ns > kMostNs) return true;
  if (least_share == 1 && !mixed_) return false;
  const double most_ns = static_cast<double>(kMostNs) * least_share / (mixed_ ? static_cast<double>(in_flight) : 1.0);
  return static_cast<double>(static_cast<std::uint64_t>(backlog_ns)) > most_ns;
}

TransferId Links::start(std::int64_t now_ns, std::span<const LinkId> path, std::uint64_t bytes, Priority priority) {
  return start_all(now_ns, path, std::span(&bytes, 1), priority);
}

TransferId Links::start_all(std::int64_t now_ns, std::span<const LinkId> path, std::span<const std::uint64_t> bytes,
                            Priority priority) {
  if (path.empty() || path.size() > 2)
    throw Error(ErrorKind::InvalidArgument, "a path has one link or two, got ", path.size());
  std::int64_t flow_ns = now_ns;
  for (const LinkId id : path) {
    if (id >= links_.size()) throw Error(ErrorKind::InvalidArgument, "there is no link ", id);
    flow_ns += links_[id].fixed_ns;
  }
  if (path.size() == 2 && path[0] == path[1])
    throw Error(ErrorKind::InvalidArgument, "the path crosses link ", links_[path[0]].usage.name, " twice");
  const auto too_many = [&](const Links& links) { return links.in_flight_ + bytes.size() > LinkFlow::kMaxTransfers; };
  if (too_many(*this) && too_many(as_of(now_ns)))
    throw Error(ErrorKind::CapacityExhausted, "at most ", LinkFlow::kMaxTransfers,
                " transfers can be in flight at once");

  const LinkFlow::LaneId lane = lane_of(path, priority);
  LinkFlow::Wide more_ns = 0;
  std::uint64_t all_bytes = 0;
  for (const std::uint64_t one : bytes) {
    if (one > LinkFlow::kMaxBytes) {
      throw Error(ErrorKind::InvalidArgument, "link ", links_[path[0]].usage.name,
                  ": a transfer has at most 2^38 bytes, got ", one);
    }
    more_ns += LinkFlow::alone_ns(flow_.lane_at(lane), one);
    all_bytes += one;
  }
  const auto too_long = [&](const Links& links) {
    return links.takes_years(links.backlog_ns_ + more_ns, links.in_flight_ + bytes.size(), least_share_);
  };
  if (too_long(*this) && too_long(as_of(now_ns))) {
    throw Error(ErrorKind::CapacityExhausted, "link ", links_[path[0]].usage.name,
                ": the transfers in flight would take years; check bandwidth_gbps");
  }

  advance(now_ns);
  for (const LinkId id : path) {
    links_[id].usage.bytes_started += all_bytes;
    links_[id].usage.transfers_started += bytes.size();
  }
  const TransferId first = next_id_;
  next_id_ += bytes.size();
  in_flight_ += bytes.size();
  backlog_ns_ += more_ns;
  predicted_.reset();
  Ledger ledger(*this);
  flow_.start(now_ns, flow_ns, lane, first, bytes, ended_, &ledger);
  return first;
}

LinkFlow::LaneId Links::lane_of(std::span<const LinkId> path, Priority priority) {
  std::optional<LinkFlow::LaneId>& known = links_[path[0]].alone[static_cast<std::size_t>(priority)];
  std::optional<Link::Paired>& paired = links_[path[0]].paired[static_cast<std::size_t>(priority)];
  if (path.size() == 1 && known) return *known;
  if (path.size() == 2 && paired && paired->with == path[1]) return paired->lane;
  std::array<LinkFlow::PortId, 4> ports{};
  std::size_t num_ports = 0;
  std::size_t num_own = 0;
  for (const LinkId id : path) {
    ports[num_ports++] = links_[id].port;
    if (const std::optional<DuplexId>& duplex = links_[id].duplex) {
      const LinkFlow::PortId cap = duplexes_[*duplex].port;
      if (num_ports < 3 || ports[1] != cap) ports[num_ports++] = cap;  // once, if both links share it
    }
    if (num_own == 0) num_own = num_ports;
  }
  const std::span<const LinkFlow::PortId> all = std::span(ports).first(num_ports);
  unsigned orders = 0;
  for (const LinkFlow::PortId port : all) orders |= orders_[port];
  mixed_ = mixed_ || orders == 3;
  const LinkFlow::LaneId lane = flow_.lane(path, all.first(num_own), all.subspan(num_own), priority);
  if (path.size() == 1) known = lane;
  if (path.size() == 2) paired = {path[1], lane};
  return lane;
}

std::optional<std::int64_t> Links::next_completion_ns() const {
  if (!ended_.empty()) return now_ns_;
  const std::optional<LinkFlow::Next> next = flow_.next();
  if (!next) return std::nullopt;
  if (next->is_end) return next->time_ns;
  const std::vector<Completion>& ends = predict_ends();
  return std::ranges::upper_bound(ends, now_ns_, {}, &Completion::time_ns)->time_ns;
}

std::optional<std::int64_t> Links::next_wake_ns() const {
  const std::int64_t wake_ns = next_wake_or_never_ns();
  return wake_ns == LinkFlow::kNeverNs ? std::nullopt : std::optional(wake_ns);
}

std::vector<Completion> Links::pop_due(std::int64_t now_ns) {
  std::vector<Completion> due;
  pop_due(now_ns, due);
  return due;
}

void Links::pop_due(std::int64_t now_ns, std::vector<Completion>& due) {
  advance(now_ns);
  due.clear();
  due.swap(ended_);
  UNDERSTUDY_ASSERT(due.empty() || due.back().time_ns <= now_ns, "a transfer is reported before its end");
  if (due.size() > 1) std::ranges::sort(due);
}

std::int64_t Links::deadline_ns(TransferId id) const {
  for (const Completion& ended : ended_) {
    if (ended.id == id) return ended.time_ns;
  }
  predict_ends();
  const auto found = predicted_of_.find(id);
  // Predictions stay in the map after the transfers have ended.
  if (found == predicted_of_.end() || found->second <= now_ns_)
    throw Error(ErrorKind::InvalidArgument, "transfer ", id, " is not in flight");
  return found->second;
}

LinkUsage Links::usage(LinkId id) const {
  if (id >= links_.size()) throw Error(ErrorKind::InvalidArgument, "there is no link ", id);
  const Link& link = links_[id];
  const LinkFlow::Port& port = flow_.port(link.port);
  const LinkFlow::Tick now = LinkFlow::tick_of(now_ns_);
  LinkUsage usage = link.usage;
  LinkFlow::Tick busy = port.busy_ticks;
  if (port.flowing[0] + port.flowing[1] > 0) busy += now - port.busy_since;
  usage.busy_ns = static_cast<std::int64_t>(busy >> LinkFlow::kTickBits);
  class Spread final : public LinkFlow::Listener {
   public:
    explicit Spread(LinkUsage& usage) : usage_(usage) {}
    void moved(LinkId, LinkFlow::Tick from, LinkFlow::Tick to, LinkFlow::Wide units) override {
      usage_.spread(ns_of(from), ns_of(to), bytes_of(units));
    }
    void ended(const LinkFlow::Lane&, std::int64_t, std::uint64_t) override {}

   private:
    LinkUsage& usage_;
  };
  Spread spread(usage);
  flow_.report_moving(id, link.port, now, spread);
  return usage;
}

void Links::check() const {
  flow_.check();
  std::uint64_t started = 0;
  std::uint64_t finished = 0;
  for (const Link& link : links_) {
    const LinkUsage& usage = link.usage;
    if (usage.bytes_finished > usage.bytes_started || usage.transfers_finished > usage.transfers_started)
      throw Error(ErrorKind::InvariantViolated, "link ", usage.name, " delivered more than it was given");
    if (in_flight_ == 0 && usage.bytes_finished != usage.bytes_started)
      throw Error(ErrorKind::InvariantViolated, "link ", usage.name, " is idle and did not deliver all bytes");
    started += usage.transfers_started;
    finished += usage.transfers_finished;
  }
  if (flow_.under_way() != in_flight_) throw Error(ErrorKind::InvariantViolated, "links: transfers are miscounted");
  if ((in_flight_ == 0) != (started == finished))
    throw Error(ErrorKind::InvariantViolated, "links: a transfer was lost");
  const std::optional<LinkFlow::Next> next = flow_.next();
  if (next && next->time_ns <= now_ns_) throw Error(ErrorKind::InvariantViolated, "links: an end was missed");
}

// Returns a copy advanced to `now_ns`, for checks that must not change anything.
Links Links::as_of(std::int64_t now_ns) const {
  Links then = *this;
  then.advance(now_ns);
  return then;
}

void Links::advance(std::int64_t now_ns) {
  if (now_ns < now_ns_)
    throw Error(ErrorKind::InvalidArgument, "now_ns ", now_ns, " is before ", now_ns_, ": time never goes backwards");
  now_ns_ = now_ns;
  if (flow_.next_ns() > now_ns) return;
  Ledger ledger(*this);
  flow_.run_until(now_ns, ended_, &ledger);
  UNDERSTUDY_ASSERT(flow_.next_ns() > now_ns, "an end was missed");
}

const std::vector<Completion>& Links::predict_ends() const {
  if (!predicted_) {
    LinkFlow ahead = flow_;
    std::vector<Completion> ends;
    ahead.run_dry(ends);
    std::ranges::sort(ends);
    predicted_of_.clear();
    for (const Completion& end : ends) predicted_of_.emplace(end.id, end.time_ns);
    predicted_ = std::move(ends);
  }
  return *predicted_;
}

void Links::Ledger::moved(LinkId link, LinkFlow::Tick from, LinkFlow::Tick to, LinkFlow::Wide units) {
  links_.links_[link].usage.spread(ns_of(from), ns_of(to), bytes_of(units));
}

void Links::Ledger::ended(const LinkFlow::Lane& lane, std::int64_t time_ns, std::uint64_t bytes) {
  UNDERSTUDY_ASSERT(links_.in_flight_ > 0, "a transfer ended that was not in flight");
  UNDERSTUDY_ASSERT(links_.backlog_ns_ >= LinkFlow::alone_ns(lane, bytes), "the backlog is less than a transfer");
  --links_.in_flight_;
  links_.backlog_ns_ -= LinkFlow::alone_ns(lane, bytes);
  UNDERSTUDY_ASSERT(links_.in_flight_ > 0 || links_.backlog_ns_ == 0, "idle links have a backlog");
  for (std::uint32_t i = 0; i < lane.num_links; ++i) {
    LinkUsage& usage = links_.links_[lane.links[i]].usage;
    usage.bytes_finished += bytes;
    ++usage.transfers_finished;
    const double at = static_cast<double>(time_ns);
    UNDERSTUDY_ASSERT(usage.bytes_finished <= usage.bytes_started, "a link delivered more bytes than it was given");
    UNDERSTUDY_ASSERT(usage.transfers_finished <= usage.transfers_started, "a link ended a transfer twice");
    if (lane.least_port == 0) usage.spread(at, at, static_cast<double>(bytes));
  }
}

}  // namespace understudy
