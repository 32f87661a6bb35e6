// The decode instance: prompts whose blocks another instance has, until they have arrived.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "base/request_id.hpp"
#include "engine/handoff_net.hpp"
#include "engine/vllm/handoff/settings.hpp"
#include "slots/slot.hpp"

namespace understudy {

// Orders of a schedule to the worker of the same instance.
struct ReceiveOrders {
  std::vector<Pull> pulls;           // those without blocks first
  std::vector<RequestId> heartbeat;  // in ascending order
};

class KvReceiver {
 public:
  struct Peer {
    std::uint32_t worker = 0;
    RequestId request = 0;  // its id there
  };

  explicit KvReceiver(const VllmTransfer& settings) : interval_ns_(settings.lease_s / 6 * kSecond) {}

  // A request came whose blocks a peer has.
  void came(RequestId id, std::uint32_t peer, RequestId peer_request) {
    unpulled_.insert(id);
    waits_.emplace(id, Peer{peer, peer_request});
  }
  // Whether its one pull is still to come.
  bool wants(RequestId id) const { return unpulled_.contains(id); }
  void pull(Pull pull);
  // The request got blocks without its peer's: the pull is spent, and its peer is notified.
  void give_up(Pull pull) {
    pull.blocks.clear();
    this->pull(std::move(pull));
  }
  // The request ends. If it never pulled, its peer is notified.
  void ended(RequestId id, std::uint32_t peer, RequestId peer_request);
  void received(RequestId id) { waits_.erase(id); }
  ReceiveOrders close_schedule(std::int64_t now_ns);

  bool has_orders() const noexcept { return !notify_.empty(); }
  // When the next heartbeat is due at the earliest; kNever: no request waits.
  std::int64_t next_heartbeat_ns() const noexcept {
    return waits_.empty() ? kNever : (beat_ ? last_ns_ + interval_ns_ : 0);
  }
  const Peer& peer_of(RequestId id) const { return waits_.at(id); }

 private:
  static constexpr std::int64_t kSecond = 1'000'000'000;
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

  std::int64_t interval_ns_;
  std::set<RequestId> unpulled_;
  std::map<RequestId, Peer> waits_;  // from their arrival until their blocks have come
  std::vector<Pull> notify_;
  std::vector<Pull> pulls_;
  bool beat_ = false;  // a heartbeat was sent, at last_ns_
  std::int64_t last_ns_ = 0;
};

}  // namespace understudy
