// The network of a run: hand-offs over the workers' links, and the notifications between instances.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/request_id.hpp"
#include "slots/slot.hpp"
#include "tiers/transfer_hub.hpp"

namespace understudy {

// A request for blocks of a peer.
struct Pull {
  RequestId request = 0;
  std::uint32_t peer = 0;      // the prefill worker
  RequestId peer_request = 0;  // id of the request there
  std::vector<SlotId> blocks;  // to fill, in order: the last of the prompt. Empty: the peer may free its blocks
};

// Links of one worker that takes part in hand-offs. Infinity: no limit.
struct HandOffLinks {
  double out_gbps = std::numeric_limits<double>::infinity();      // of a prefill worker, 10^9 bytes per second
  double in_gbps = std::numeric_limits<double>::infinity();       // of a decode worker
  double backend_gbps = std::numeric_limits<double>::infinity();  // shared by all hand-offs of the run
  std::int64_t fixed_ns = 0;                                      // from the posting of a transfer until bytes flow
  std::uint64_t bytes_per_block = 0;
};

// A read of blocks.
struct HandOffRecord {
  RequestId request = 0;
  RequestId peer_request = 0;
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  std::uint64_t bytes = 0;
  std::int64_t posted_ns = 0;
  std::int64_t landed_ns = 0;  // kNever in flight
  bool failed = false;
  std::int64_t offered_ns = -1;  // pushed KV: when the decode worker had memory for it
};

// Everything here has the time from which its reader can see it: readers may be behind. A read is posted when a step of
// the decode worker is launched, and ends when the links have moved its bytes; reads that run side by side share them.
//
// A worker of another process is far: until the driver has connected it, reads and notifications to it wait and
// heartbeats are lost, as during the connector's handshake. The driver delivers what was sent to it.
class HandOffNet final : public TransferOwner {
 public:
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

  struct Heartbeat {
    std::int64_t time_ns = 0;
    std::vector<RequestId> requests;
  };

  HandOffNet(TransferHub& hub, const HandOffLinks& links) : hub_(hub), settings_(links) {}

  // Adds the links of the next worker and returns its number.
  std::uint32_t add_worker(bool produces, bool consumes, bool far = false);
  std::size_t workers() const noexcept { return sides_.size(); }

  // ── Far workers ──
  // Workers that were needed since the last call and are not connected.
  std::vector<std::uint32_t> take_wanted() { return std::exchange(wanted_, {}); }
  void connect(std::uint32_t worker, std::int64_t now_ns);
  // The handshake failed, or the connection ended: reads that wait for it fail, those in flight when they end, and
  // notifications that wait are lost.
  void disconnect(std::uint32_t worker, std::int64_t now_ns);
  // The next `count` reads by a worker fail when they end, without a notification.
  void fail_reads(std::uint32_t worker, std::uint32_t count) { sides_.at(worker).to_fail = count; }
  // Each read fails with this probability when it ends; which ones depends on the seed and the request alone.
  void set_failure_rate(double rate, std::uint64_t seed);

  // ── Decode workers ──
  void read(std::uint32_t reader, const Pull& pull, std::int64_t now_ns);
  void notify(std::uint32_t worker, RequestId request, std::int64_t now_ns);
  void heartbeat(std::uint32_t worker, Heartbeat heartbeat);
  // Posts reads that waited for a connection.
  void post_waiting(std::uint32_t reader, std::int64_t now_ns);

  // ── Pushed KV (PushNet) ──
  HandOffRecord& add_record(const HandOffRecord& record) { return records_.emplace_back(record); }
  // Moves bytes from a prefill to a decode worker; `owner` is notified when they have arrived.
  void move(std::uint32_t from, std::uint32_t to, std::uint64_t bytes, std::int64_t now_ns, TransferOwner& owner,
            const Purpose& purpose);
  void reach(std::uint32_t worker) { reached_.push_back(worker); }
  bool draws_failure(RequestId request) const noexcept;
  std::uint64_t bytes_per_block() const noexcept { return settings_.bytes_per_block; }
  std::int64_t fixed_ns() const noexcept { return settings_.fixed_ns; }

  // ── Pull by workers ──
  // Requests whose hand-off ended by `now_ns`: read by this worker (decode), or from this worker (prefill). `failed` is
  // a part of `out`.
  void take_received(std::uint32_t worker, std::int64_t now_ns, std::vector<RequestId>& out,
                     std::vector<RequestId>& failed);
  // Whether a failed read has ended that the worker has not seen yet.
  bool has_failed(std::uint32_t worker) const noexcept { return sides_[worker].failed > 0; }
  void take_notes(std::uint32_t worker, std::int64_t now_ns, std::vector<RequestId>& out);
  void take_heartbeats(std::uint32_t worker, std::int64_t now_ns, std::vector<Heartbeat>& out);
  // A prefill worker was notified of a read after the lease of the blocks.
  void count_late(std::uint32_t worker) noexcept { ++sides_[worker].late; }
  std::uint64_t late_notifications(std::uint32_t worker) const { return sides_.at(worker).late; }
  // When the next of these is to be seen, as far as is known; kNever: nothing.
  std::int64_t next_ns(std::uint32_t worker) const noexcept;

  void landed(const Purpose& purpose, std::int64_t time_ns) override;
  // Workers for which something has landed since the last call.
  std::vector<std::uint32_t> take_reached() { return std::exchange(reached_, {}); }

  const std::deque<HandOffRecord>& records() const noexcept { return records_; }
  // Forgets the oldest records up to the first read in flight, and returns them; for runs without an end.
  std::vector<HandOffRecord> take_ended();
  TransferHub& hub() noexcept { return hub_; }

 private:
  struct Note {
    std::int64_t time_ns = 0;
    RequestId request = 0;
    bool failed = false;
  };
  struct WaitingRead {
    std::uint32_t reader = 0;
    Pull pull;
  };
  struct Side {
    std::optional<LinkId> out;
    std::optional<LinkId> in;
    std::vector<Note> received;
    std::vector<Note> notes;
    std::vector<Heartbeat> heartbeats;
    bool connected = true;
    std::vector<WaitingRead> waiting;      // for the connection
    std::vector<RequestId> waiting_notes;  // likewise
    std::int64_t poll_from_ns = kNever;    // a connection has come
    std::uint32_t to_fail = 0;             // reads
    std::uint32_t failed = 0;              // among `received`
    std::uint64_t late = 0;                // notifications after the lease
  };

  void post(std::uint32_t reader, const Pull& pull, std::int64_t now_ns);
  void note(std::uint32_t worker, RequestId request, std::int64_t now_ns);
  void receive(std::uint32_t worker, const Note& note);
  bool reaches(std::uint32_t worker);

  TransferHub& hub_;
  HandOffLinks settings_;
  double failure_rate_ = 0;
  std::uint64_t failure_seed_ = 0;
  std::optional<DuplexId> backend_;
  std::vector<Side> sides_;
  std::deque<HandOffRecord> records_;  // in the order of posting
  std::uint32_t first_record_ = 0;     // number of the oldest that is kept
  std::vector<std::uint32_t> reached_;
  std::vector<std::uint32_t> wanted_;
};

}  // namespace understudy
