// A simulated SGLang engine: its scheduler on a clock, normal or with overlap.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/config.hpp"
#include "engine/engine.hpp"
#include "engine/sglang/scheduler.hpp"

namespace understudy {

struct SglangConfig final : EngineConfig {
  SglangSettings settings;

  std::unique_ptr<Engine> make(const EngineSite& site) const override;
  std::shared_ptr<EngineConfig> clone() const override { return std::make_shared<SglangConfig>(*this); }
  bool reads_identities() const noexcept override { return !settings.disable_radix_cache; }
};

// Normal: a step is schedule (begin_step) and result (end_step). With overlap, the next batch is scheduled when one
// begins, before its result is known, so a request submitted while batch s runs is first computed in batch s + 2.
class SglangEngine final : public Engine, private Residency {
 public:
  SglangEngine(const SglangConfig& config, const EngineSite& site);

  const Effects& submit(RequestSpec spec, std::int64_t now_ns) override;
  // An abort is received when the next batch is scheduled; the request ends as SGLang ends it.
  const Effects& cancel(RequestId id, std::int64_t now_ns) override;
  const Effects& begin_step(std::int64_t now_ns) override;
  const Effects& end_step(std::int64_t end_ns) override;
  EngineSnapshot snapshot() const override;

  std::optional<std::string> never_fits(std::uint32_t prompt_tokens, std::uint32_t max_tokens) const override;
  void take_events(TimedEvents& out) override;
  const Residency& residency() const override { return *this; }
  std::size_t published_prefix(std::span<const BlockIdentity> blocks) override;
  void keep_times() override { keeps_gaps_ = true; }
  void take_gaps(GapSum& out) override;
  std::vector<EngineSample> samples() const override { return samples_; }
  void check() override { scheduler_.check(); }

 private:
  struct Live {
    RequestSpec spec;
    RequestRecord record;
    std::vector<BlockIdentity> names;
    std::vector<std::int64_t> gaps_ns;  // between its tokens, if kept
    bool reported = false;              // its record was returned when it was cancelled
  };

  // Residency: one pool, the device.
  std::size_t num_pools() const noexcept override { return 1; }
  Tier tier(std::size_t) const override { return Tier::G1; }
  std::size_t num_hashes() const override { return cached_.size(); }
  void has_blocks(std::size_t, std::span<const BlockIdentity> blocks, bool* out) const override;
  std::vector<BlockIdentity> resident(std::size_t) const override;

  bool names_pages() const noexcept { return config_.events || config_.published_blocks; }
  void changed(RadixNode& node, bool stored);
  std::unique_ptr<SglangBatch> schedule(std::int64_t now_ns);
  StepLoad load_of(const SglangBatch& batch) const;
  void apply_log(std::int64_t now_ns);
  void finish(RequestId id, FinishReason reason, std::int64_t now_ns);
  void sample(std::int64_t now_ns);
  Phase phase() const;
  Effects& fresh();
  const Effects& done();

  SglangConfig config_;
  StepTiming timing_;
  SglangScheduler scheduler_;
  std::unordered_map<RequestId, Live> live_;
  std::vector<RequestId> aborts_;  // not received yet
  std::vector<RequestId> ended_;   // the scheduler may still have them in a batch
  std::unique_ptr<SglangBatch> open_;
  std::unique_ptr<SglangBatch> planned_;  // overlap: the batch behind the open one
  std::int64_t now_ns_ = 0;
  std::int64_t empty_since_ns_ = 0;
  bool stalled_ = false;
  Effects effects_;
  EngineTotals totals_;
  std::uint64_t stored_pages_ = 0;
  std::uint64_t removed_pages_ = 0;
  std::unordered_map<std::uint64_t, BlockIdentity> cached_;  // by sequence hash, if pages have names
  TimedEvents events_;
  std::uint64_t next_event_ = 1;
  bool keeps_gaps_ = false;
  std::unordered_map<std::int64_t, std::int64_t> gaps_;
  std::vector<EngineSample> samples_;
};

}  // namespace understudy
