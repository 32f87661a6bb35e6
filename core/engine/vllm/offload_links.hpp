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

// As vLLM's worker, which has a stream for each direction. Stores of a batch are begun with the next, so that they
// never delay its tokens.
class OffloadLinks final : public TransferOwner {
 public:
  // `samples`: where what has ended is counted one by one; null for nowhere.
  OffloadLinks(TransferHub& hub, const LinkPair& way, const LinkPairConfig& speeds, std::uint64_t bytes_per_block,
               OffloadSamples* samples)
      : hub_(hub), ways_{way.down, way.up}, down_(speeds.down), bytes_per_block_(bytes_per_block), samples_(samples) {}

  // The batch with these orders begins. Returns until when it waits for what must be flushed: exact, unless somebody
  // else joins the link.
  std::int64_t begin(const OffloadOrders& orders, const OffloadConnector& connector, std::int64_t now_ns);
  // Those that are done and were not taken: stores before loads, each in order.
  std::vector<JobId> take_done();
  // Of them, those that ended first, all at one time, which `time_ns` then is.
  std::vector<JobId> take_first_done(std::int64_t& time_ns);

  bool has_done() const noexcept { return !done_[kDown].empty() || !done_[kUp].empty(); }
  bool idle() const noexcept { return queues_[kDown].empty() && queues_[kUp].empty() && unsubmitted_.empty(); }
  bool submitted() const noexcept { return unsubmitted_.empty(); }
  // How long each load took that has ended, from when it was asked for, if that is kept.
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
  std::array<std::deque<Job>, 2> queues_;  // the first is under way
  TransferId under_way_ = 0;               // of the stores
  std::array<std::vector<JobId>, 2> done_;
  std::array<std::vector<std::int64_t>, 2> done_ns_;  // and when each was
  std::array<std::int64_t, 2> started_ns_{};          // of those under way
  OffloadSamples* samples_;
  bool keeps_load_times_ = false;
  std::vector<std::int64_t> load_ns_;
};

}  // namespace understudy
