// The scheduler's side of vLLM's native host offload: lookups, loads, stores and flushes.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/huge_array.hpp"
#include "engine/vllm/connector/output.hpp"
#include "engine/vllm/kv_backend.hpp"
#include "engine/vllm/offload_config.hpp"
#include "tiers/vllm_host.hpp"

namespace understudy {

// A transfer between device and host.
struct OffloadJob {
  JobId id = 0;
  RequestId request = 0;
  std::uint32_t tracked = 0;  // the connector's name of its request
  bool store = false;
  std::uint32_t first_chunk = 0;      // of a load: its first chunk
  std::vector<std::uint32_t> chunks;  // positions
  std::vector<std::size_t> groups;    // of the chunks; empty: one group
  std::vector<SlotId> host;           // a slot for each
  std::vector<SlotId> device;         // their blocks
  bool forgotten = false;             // by a reset: its end changes nothing on the host
};

// Transfers that one schedule requests from the worker.
struct OffloadOrders {
  std::vector<JobId> loads;
  std::vector<JobId> stores;
  std::vector<JobId> flush;  // to be done before the step computes

  bool empty() const noexcept { return loads.empty() && stores.empty() && flush.empty(); }
};

struct OffloadTotals {
  std::uint64_t lookups = 0;
  std::uint64_t deferred_lookups = 0;
  std::uint64_t loads = 0;  // jobs
  std::uint64_t loaded_chunks = 0;
  std::uint64_t loaded_tokens = 0;
  std::uint64_t stores = 0;
  std::uint64_t stored_chunks = 0;
  std::uint64_t refused_stores = 0;  // offers that found no room
  std::uint64_t evicted_chunks = 0;
  std::uint64_t flushed_jobs = 0;
};

// Single samples since the last take, for the histograms of a server.
struct OffloadSamples {
  struct Moved {
    std::uint64_t bytes = 0;
    std::int64_t ns = 0;
  };
  std::vector<Moved> loads;  // over the links, ended
  std::vector<Moved> stores;
  std::uint64_t lookups = 0;              // lookups for requests without transfers
  std::vector<std::int64_t> deferred_ns;  // from a request's first deferred lookup to its answer, or its end
  std::vector<std::size_t> asked_chunks;  // chunks that a store needed, whether or not there was room
  std::uint64_t refused_stores = 0;
};

// Log of a schedule and the update behind it, in the format of a recording.
struct OffloadLog {
  struct Lookup {
    RequestId request = 0;
    std::uint32_t local = 0;
    std::optional<std::uint32_t> hit;  // none: deferred
  };
  struct Blocks {
    RequestId request = 0;
    bool resumed = false;
    bool fresh = false;  // first admission
    std::vector<SlotId> slots;
  };
  struct Load {
    OffloadJob job;
    std::uint32_t tokens = 0;
    std::vector<std::uint64_t> hashes;
    std::vector<SlotId> table;
  };
  struct Store {
    OffloadJob job;
    std::vector<std::uint64_t> hashes;
  };
  std::vector<Lookup> lookups;
  std::vector<Load> loads;
  std::vector<Store> stores;
  std::vector<RequestId> refused;
  std::vector<JobId> flush;
  std::vector<Blocks> blocks;
  std::vector<JobId> done;
  std::vector<std::vector<std::uint64_t>> evicted;  // by the store that needed their room
};

// Receives everything that the scheduler does with a request. A request is known by its slot until it has ended.
class OffloadConnector {
 public:
  OffloadConnector(const VllmOffload& config, std::uint32_t block_size, bool prefix_caching, BlockStore& store,
                   std::uint64_t num_device_blocks);
  virtual ~OffloadConnector() = default;

  const VllmOffload& config() const noexcept { return config_; }
  VllmHost& host() noexcept { return host_; }
  const VllmHost& host() const noexcept { return host_; }

  virtual void came(const KvRequest& request);
  // ── Admission ──
  // Loadable tokens behind `local` ones (found on the device, whole blocks); nothing: retry in the next step.
  virtual std::optional<std::uint32_t> look_up(KvRequest& request, std::uint32_t local, std::int64_t now_ns);
  // Whether fewer tokens than the lookup found can be loaded.
  virtual bool can_load(const KvRequest&, std::uint32_t, std::uint32_t) { return true; }
  // The request has blocks for the chunks found: start loading them.
  virtual void begin_load(const KvRequest& request, std::uint32_t local, std::uint32_t tokens);
  // The request got its blocks for a load by others.
  void handed_out(const KvRequest& request) { allocated(request.ids(ids_)); }

  // ── Schedule ──
  virtual void preempted(const KvRequest& request);
  // The request was scheduled, and will have computed `after` tokens; `admitted` in this schedule.
  virtual void scheduled(KvRequest& request, std::uint32_t after, bool admitted, bool resumed);
  // End the schedule; returns the transfers requested from the worker.
  OffloadOrders close_schedule();
  // The request has ended, and `computed` of its tokens have (or are being given) KV. Call before its blocks are freed.
  virtual void ended(KvRequest& request, std::uint32_t computed, bool aborted, std::int64_t now_ns);

  // ── Update ──
  // The worker has finished these jobs, in this order.
  void done(std::span<const JobId> jobs);
  const OffloadJob& job(JobId id) const { return jobs_.at(id); }

  // Drop everything on the host. Jobs in flight are forgotten, and flushed by the next schedule.
  void reset();

  // ── Watch ──
  bool has_jobs() const noexcept { return !jobs_.empty(); }
  bool has_ended_to_tell() const noexcept { return !ended_.empty(); }
  // True if the connector has nothing to do while requests only decode (with prompt-only stores).
  bool quiet() const noexcept { return ended_.empty() && fenced_.empty() && refused_last_ == 0; }
  const OffloadTotals& totals() const noexcept { return totals_; }
  OffloadLog& log() noexcept { return log_; }
  OffloadSamples& samples() noexcept { return samples_; }
  void check() const { host_.check(); }

 protected:
  static constexpr std::uint32_t kNobody = std::numeric_limits<std::uint32_t>::max();

  struct Tracked {
    RequestId request = 0;
    double arrival_time = 0;
    std::uint32_t next_stored = 0;  // chunk
    std::uint64_t user = 0;         // its number in the host's order
    std::int64_t deferred_ns = -1;  // since when its lookup has no answer
    std::vector<JobId> jobs;
    std::vector<ChunkMemo> memos;  // one per chunk, by position
    // Table at the request's preemption or end.
    std::vector<SlotId> blocks;
    // Set when the request ends.
    bool has_ended = false;
    bool signalled = false;
    std::uint32_t known = 0;
    std::uint32_t after = 0;
    std::uint32_t prompt = 0;
    std::vector<BlockIdentity> names;
  };

  // State that a decode-only step reads.
  struct Seat {
    std::uint32_t tracked = kNobody;
    std::uint32_t reported_blocks = 0;  // of the table, by schedules so far
    std::uint32_t due = 0;              // token count at which the next chunk can be stored
  };

  struct Offer {
    KvRequest* request;
    std::uint32_t after;
  };

  // ── The end of a schedule, in this order ──
  virtual void before_flushes() {}
  virtual void before_stores() {}
  virtual void store_offer(const Offer& offer);
  virtual void store_ended(std::uint32_t index);
  virtual void end_on_host(std::uint32_t index);

  Tracked& of(const KvRequest& request) { return tracked_[seats_[request.slot].tracked]; }
  std::uint32_t due(const Tracked& tracked, std::uint32_t prompt) const noexcept;
  std::uint32_t num_chunks(std::uint32_t tokens) const noexcept { return tokens / chunk_tokens_; }
  void name(KvRequest& request, std::uint32_t chunks) const;
  // Identities of chunks [first, end) of blocks with these names.
  std::span<const BlockIdentity> keys(std::span<const BlockIdentity> names, std::uint32_t first, std::uint32_t end);
  std::span<ChunkMemo> memos(Tracked& tracked, std::uint32_t first, std::uint32_t end);
  void answered(Tracked& tracked, std::int64_t now_ns);
  std::optional<std::uint32_t> scan(const KvRequest& request, std::uint32_t local, std::uint32_t chunks);
  OffloadJob& new_job(std::uint32_t tracked, bool store);
  void store(std::uint32_t index, std::span<const BlockIdentity> names, std::span<const SlotId> blocks,
             std::uint32_t known, std::uint32_t after, std::uint32_t prompt);
  void touch_all(Tracked& tracked, std::span<const BlockIdentity> names, std::uint32_t known);
  void fence(const OffloadJob& job);
  void allocated(std::span<const SlotId> slots);
  void remember(Tracked& tracked, const KvRequest& request, std::uint32_t count);
  void forget(std::uint32_t index);

  VllmOffload config_;
  std::uint32_t chunk_tokens_;
  bool defers_to_loads_;  // wait for chunks that another request loads: they will be on the device
  VllmHost host_;

  std::vector<Seat> seats_;  // requests that have not ended, by slot
  std::deque<Tracked> tracked_;
  std::vector<std::uint32_t> free_tracked_;
  std::unordered_map<JobId, OffloadJob> jobs_;
  JobId next_job_ = 0;
  std::vector<std::uint32_t> ended_;  // since the last schedule; indexes tracked_

  // State of the current schedule.
  std::vector<Offer> offers_;  // requests with chunks to store
  OffloadOrders orders_;
  std::vector<SlotId> allocated_;
  HugeArray<std::uint64_t> allocated_in_;  // by device slot: the schedule that last allocated it
  std::uint64_t schedule_ = 1;
  std::size_t refused_last_ = 0;
  std::unordered_map<SlotId, std::vector<JobId>> fenced_;  // device slots that stores of ended requests still read
  bool fences_early_ = false;                              // also slots of requests that have not ended

  OffloadTotals totals_;
  OffloadLog log_;
  OffloadSamples samples_;

  // Scratch.
  std::vector<SlotId> ids_;  // of a request
  std::vector<BlockIdentity> keys_;
  std::vector<std::uint32_t> places_;
  std::vector<SlotId> slots_;
};

}  // namespace understudy
