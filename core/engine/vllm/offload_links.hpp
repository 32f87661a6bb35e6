// The transfers of vLLM's offload on the links: one at a time in each direction, in order.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "engine/vllm/offload_connector.hpp"
#include "tiers/shared_tier.hpp"
#include "tiers/transfer_hub.hpp"

namespace understudy {

// Like vLLM's worker, with a stream for each direction. Stores of a batch begin with the next batch, so they never
// delay its tokens.
class OffloadLinks final : public TransferOwner {
 public:
  // `samples` counts each finished transfer; null: none.
  OffloadLinks(TransferHub& hub, const LinkPair& way, const LinkPairConfig& speeds, std::uint64_t bytes_per_block,
               OffloadSamples* samples)
      : hub_(hub), ways_{way.down, way.up}, down_(speeds.down), bytes_per_block_(bytes_per_block), samples_(samples) {}

  // Begin the batch with these orders. Returns until when it waits for flushed jobs: exact, unless another worker joins
  // the link.
  std::int64_t begin(const OffloadOrders& orders, const OffloadConnector& connector, std::int64_t now_ns);
  // Take the finished jobs: stores before loads, each in order.
  std::vector<JobId> take_done();
  // Take only the jobs that finished first, all at the time `time_ns`.
  std::vector<JobId> take_first_done(std::int64_t& time_ns);

  bool has_done() const noexcept { return !done_[kDown].empty() || !done_[kUp].empty(); }
  bool idle() const noexcept { return queues_[kDown].empty() && queues_[kUp].empty() && unsubmitted_.empty(); }
  bool submitted() const noexcept { return unsubmitted_.empty(); }
  // Duration of each finished load since its request, if kept.
  void keep_load_times() noexcept { keeps_load_times_ = true; }
  const std::vector<std::int64_t>& load_ns() const noexcept { return load_ns_; }

  void landed(const Purpose& purpose, std::int64_t time_ns) override;

 private:
  enum Direction : std::uint32_t { kDown, kUp };
  struct Job {
    JobId id;
    std::uint64_t bytes;
    std::int64_t asked_ns;
  };

  void submit(Direction direction, JobId id, const OffloadConnector& connector, std::int64_t now_ns);
  void start(Direction direction, std::int64_t now_ns);

  TransferHub& hub_;
  std::array<LinkId, 2> ways_;
  LinkSettings down_;
  std::uint64_t bytes_per_block_;
  std::vector<JobId> unsubmitted_;
  std::array<std::deque<Job>, 2> queues_;  // the first is in flight
  TransferId under_way_ = 0;               // the stores' transfer
  std::array<std::vector<JobId>, 2> done_;
  std::array<std::vector<std::int64_t>, 2> done_ns_;  // end time of each
  std::array<std::int64_t, 2> started_ns_{};          // start of the current one
  OffloadSamples* samples_;
  bool keeps_load_times_ = false;
  std::vector<std::int64_t> load_ns_;
};

}  // namespace understudy
