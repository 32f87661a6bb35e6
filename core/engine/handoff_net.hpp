// The network of a run: hand-offs over the workers' links, and what instances tell each other.
#pragma once

#include <cstdint>
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

// A finished hand-off, for the report.
struct HandOffRecord {
  RequestId request = 0;
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  std::uint64_t bytes = 0;
  std::int64_t posted_ns = 0;
  std::int64_t landed_ns = 0;
};

// Everything here has the time from which its reader can see it: readers may be behind. A read is posted when a step of
// the decode worker is launched, and ends when the links have moved its bytes; reads that run side by side share them.
class HandOffNet final : public TransferOwner {
 public:
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

  struct Heartbeat {
    std::int64_t time_ns = 0;
    std::vector<RequestId> requests;
  };

  HandOffNet(TransferHub& hub, const HandOffLinks& links) : hub_(hub), settings_(links) {}

  // Adds the links of the next worker.
  void add_worker(bool produces, bool consumes);

  // ── Decode workers ──
  void read(std::uint32_t reader, const Pull& pull, std::int64_t now_ns);
  void notify(std::uint32_t worker, RequestId request, std::int64_t now_ns) { note(worker, request, now_ns); }
  void heartbeat(std::uint32_t worker, Heartbeat heartbeat) {
    sides_[worker].heartbeats.push_back(std::move(heartbeat));
  }

  // ── Pull by workers ──
  // Requests whose hand-off ended by `now_ns`: read by this worker (decode), or from this worker (prefill).
  void take_received(std::uint32_t worker, std::int64_t now_ns, std::vector<RequestId>& out);
  void take_notes(std::uint32_t worker, std::int64_t now_ns, std::vector<RequestId>& out);
  void take_heartbeats(std::uint32_t worker, std::int64_t now_ns, std::vector<Heartbeat>& out);
  // When the next of these is to be seen, as far as is known; kNever: nothing.
  std::int64_t next_ns(std::uint32_t worker) const noexcept;
  std::size_t in_flight() const noexcept { return in_flight_; }

  void landed(const Purpose& purpose, std::int64_t time_ns) override;
  // Workers for which something has landed since the last call.
  std::vector<std::uint32_t> take_reached() { return std::exchange(reached_, {}); }

  const std::vector<HandOffRecord>& records() const noexcept { return records_; }
  TransferHub& hub() noexcept { return hub_; }

 private:
  struct Note {
    std::int64_t time_ns = 0;
    RequestId request = 0;
  };
  struct Side {
    std::optional<LinkId> out;
    std::optional<LinkId> in;
    std::vector<Note> received;
    std::vector<Note> notes;
    std::vector<Heartbeat> heartbeats;
  };

  void note(std::uint32_t worker, RequestId request, std::int64_t now_ns);
  static void take(std::vector<Note>& from, std::int64_t now_ns, std::vector<RequestId>& out);

  TransferHub& hub_;
  HandOffLinks settings_;
  std::optional<DuplexId> backend_;
  std::vector<Side> sides_;
  std::vector<HandOffRecord> records_;  // in the order of posting; landed_ns is kNever in flight
  std::vector<std::uint32_t> reached_;
  std::size_t in_flight_ = 0;
};

}  // namespace understudy
