// KV that prefill workers push to decode workers, and the notices between the two sides of a request.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <limits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/handoff_net.hpp"
#include "engine/sglang/disaggregation.hpp"

namespace understudy {

// News about a request from one process to another.
enum class PushNews : std::uint8_t { Offered, Reported, Done, Failed, Drained };

struct PushMessage {
  std::uint32_t worker = 0;  // to it
  PushNews news = PushNews::Failed;
  RequestId id = 0;
  std::uint32_t prefix = 0;  // of an offer
};

// How long one side waits for the other, as far as they are in different processes.
struct PushLimits {
  std::int64_t boot_ns = HandOffNet::kNever;   // prefill: from the arrival until the decode side has memory
  std::int64_t wait_ns = HandOffNet::kNever;   // decode: from then until the KV is here
  std::int64_t drain_ns = HandOffNet::kNever;  // decode: for the acknowledgement of a failure
};

// A side sees at a poll what happened before it, and nothing of the same nanosecond: the order in which workers run
// does not show. Pieces of a request move one after another, those of different requests share the links.
class PushNet final : public TransferOwner {
 public:
  static constexpr std::int64_t kNever = HandOffNet::kNever;
  static constexpr std::uint32_t kUnknown = std::numeric_limits<std::uint32_t>::max();
  enum Side : std::size_t { kPrefill, kDecode };

  explicit PushNet(HandOffNet& net) : net_(net) {}

  // A request that both workers get.
  void open(RequestId id, std::uint32_t prefill, std::uint32_t decode);
  // One side has forgotten it.
  void leave(RequestId id, Side side, std::int64_t now_ns);

  SglangTransferState poll(RequestId id, Side side, std::int64_t now_ns);
  // Ends a request on one side; the prefill side notifies the decode side.
  void fail(RequestId id, Side side, std::int64_t now_ns);

  // Prefill side.
  std::uint32_t decode_prefix(RequestId id) const { return transfers_.at(id).prefix; }
  void send(RequestId id, std::uint32_t pages, bool last, std::int64_t now_ns);

  // Decode side.
  void offer(RequestId id, std::uint32_t prefix, std::int64_t now_ns);
  void report_failure(RequestId id, std::int64_t now_ns);
  bool is_drained(RequestId id, std::int64_t now_ns);

  // The first time after `after_ns` from which a poll of this worker sees something new.
  std::int64_t next_after(std::uint32_t worker, std::int64_t after_ns) const noexcept;
  // The worker has polled all its requests.
  void look(std::uint32_t worker, std::int64_t now_ns);

  void landed(const Purpose& purpose, std::int64_t time_ns) override;
  // Time in which pieces of any request moved, without their fixed latency.
  std::int64_t busy_ns() const noexcept;

  // ── Workers of other processes (push_far.cpp) ──
  void set_limits(const PushLimits& limits) noexcept { limits_ = limits; }
  // Notices to this worker become messages, which the driver carries.
  void set_far(std::uint32_t worker);
  // A request whose other side is in another process: kUnknown until that has offered memory. A decode side waits
  // for `connect` unless the other is connected.
  void open_far(RequestId id, Side side, std::uint32_t worker, std::uint32_t far, bool connected, std::int64_t now_ns);
  // A request without another side: its KV moves nowhere, at once.
  void open_alone(RequestId id, Side side, std::uint32_t worker);
  bool knows(RequestId id) const { return transfers_.contains(id); }
  void connect(RequestId id, std::int64_t now_ns);
  // A message of the other process; one about an unknown request is ignored.
  void receive(const PushMessage& from, std::int64_t now_ns);
  // That process is lost: requests of it whose KV is not here fail on this side.
  void lose(std::uint32_t far, std::int64_t now_ns);
  // The engine of a worker has died with its requests.
  void abandon(std::uint32_t worker, std::int64_t now_ns);
  std::vector<PushMessage> take_messages() { return std::exchange(messages_, {}); }
  // Requests that no message names any more.
  std::vector<RequestId> take_forgotten() { return std::exchange(forgotten_, {}); }
  std::int64_t next_limit_ns() noexcept;
  void expire(std::int64_t now_ns);

 private:
  struct Piece {
    std::uint32_t pages = 0;
    bool last = false;
  };
  struct Transfer {
    std::array<std::uint32_t, 2> workers{};
    std::uint32_t prefix = 0;
    std::int64_t offered_ns = kNever;
    std::int64_t sent_ns = kNever;                          // the last piece was handed over
    std::int64_t done_ns = kNever;                          // and has arrived
    std::array<std::int64_t, 2> failed_ns{kNever, kNever};  // by side
    std::int64_t reported_ns = kNever;                      // when the decode side notified the prefill side
    std::int64_t still_ns = -1;                             // since then no piece moves
    std::int64_t ready_ns = -1;                             // the decode side knows the prefill side
    std::int64_t drained_ns = kNever;                       // a far prefill side has acknowledged the notice
    bool alone = false;                                     // there is no other side
    std::deque<Piece> pieces;                               // the first one moves
    std::int64_t started_ns = 0;                            // since then
    HandOffRecord* record = nullptr;
    std::array<bool, 2> has_left{};  // by side
  };

  void add_busy(std::int64_t from_ns, std::int64_t to_ns);

  struct Limit {
    std::int64_t time_ns = 0;
    RequestId id = 0;
  };

  void start(RequestId id, Transfer& transfer, std::int64_t now_ns);
  void mark_failed(RequestId id, Transfer& transfer, Side side, std::int64_t now_ns);
  void note(std::uint32_t worker, std::int64_t now_ns);
  void forget_if_over(RequestId id, std::int64_t now_ns);
  bool is_far(std::uint32_t worker) const noexcept { return worker < far_.size() && far_[worker]; }
  bool has_far(const Transfer& transfer) const noexcept {
    return transfer.workers[kPrefill] == kUnknown || transfer.workers[kDecode] == kUnknown ||
           is_far(transfer.workers[kPrefill]) || is_far(transfer.workers[kDecode]);
  }
  void send_news(std::uint32_t worker, PushNews news, RequestId id, std::uint32_t prefix = 0);
  bool still_waits(std::size_t kind, RequestId id) const noexcept;

  HandOffNet& net_;
  std::unordered_map<RequestId, Transfer> transfers_;
  std::vector<std::vector<std::int64_t>> notes_;  // by worker: times from which polls see more, in order

  std::vector<std::pair<std::int64_t, std::int64_t>> busy_;  // times in which pieces moved, apart from each other

  PushLimits limits_;
  std::vector<bool> far_;  // by worker
  std::vector<PushMessage> messages_;
  std::vector<RequestId> forgotten_;
  std::array<std::deque<Limit>, 3> waits_;  // for an offer, for the KV, for an acknowledgement; by time
};

// One worker's end of the network.
class PushPort final : public SglangTransport {
 public:
  PushPort(PushNet& net, std::uint32_t worker, bool decodes)
      : net_(net), worker_(worker), side_(decodes ? PushNet::kDecode : PushNet::kPrefill) {}

  void set_now(std::int64_t now_ns) noexcept { now_ns_ = now_ns; }
  void leave(RequestId id) { net_.leave(id, side_, now_ns_); }
  void look() { net_.look(worker_, now_ns_); }
  std::int64_t next_ns() const noexcept { return net_.next_after(worker_, -1); }
  std::int64_t next_after(std::int64_t after_ns) const noexcept { return net_.next_after(worker_, after_ns); }

  SglangTransferState poll(RequestId id) override { return net_.poll(id, side_, now_ns_); }
  void fail(RequestId id) override { net_.fail(id, side_, now_ns_); }
  std::uint32_t decode_prefix(RequestId id) override { return net_.decode_prefix(id); }
  void send(RequestId id, std::uint32_t pages, bool last) override { net_.send(id, pages, last, now_ns_); }
  void end_sends(RequestId) override {}
  void request_pages(RequestId id, std::uint32_t, std::uint32_t prefix) override { net_.offer(id, prefix, now_ns_); }
  void report_failure(RequestId id) override { net_.report_failure(id, now_ns_); }
  bool waits_for_drain() const override { return true; }
  bool is_drained(RequestId id) override { return net_.is_drained(id, now_ns_); }

 private:
  PushNet& net_;
  std::uint32_t worker_;
  PushNet::Side side_;
  std::int64_t now_ns_ = 0;
};

}  // namespace understudy
