// A simulated SGLang engine: its scheduler on a clock, normal or with overlap.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/config.hpp"
#include "engine/engine.hpp"
#include "engine/sglang/host_links.hpp"
#include "engine/sglang/published_pages.hpp"
#include "engine/sglang/push_net.hpp"
#include "engine/sglang/scheduler.hpp"

namespace understudy {

struct SglangConfig final : EngineConfig {
  SglangSettings settings;

  std::unique_ptr<Engine> make(const EngineSite& site) const override;
  std::shared_ptr<EngineConfig> clone() const override { return std::make_shared<SglangConfig>(*this); }
  bool reads_identities() const noexcept override { return !settings.disable_radix_cache; }
  std::uint32_t outputs_of(std::uint32_t prompt_tokens, std::uint32_t asked) const override {
    return std::max(settings.most_outputs(prompt_tokens, asked), std::min(asked, 1u));  // a prefill gives one
  }
  bool publishes_below_device() const noexcept override { return settings.host.has_value(); }
  bool pushes() const noexcept override { return settings.side.role != SglangRole::Unified; }
};

// Tokens of the pools and what moved between them, for metrics.
struct SglangTokens {
  std::int64_t available = 0;
  std::uint64_t evictable = 0;
  std::uint64_t evicted = 0;  // from the device, since the engine was made
  double new_token_ratio = 0;
  std::uint64_t part_total = 0;  // window tokens or state slots; 0: the engine has neither
  std::int64_t part_available = 0;
  std::uint64_t part_evictable = 0;
  std::uint64_t host_used = 0;
  std::uint64_t host_total = 0;
  HostTotals host;
  std::uint64_t retracted_inputs = 0;
  std::uint64_t retracted_outputs = 0;
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
  const Effects& advance(std::int64_t until_ns, const AdvanceOptions& options) override;
  std::int64_t next_visible_ns() const override;
  EngineSnapshot snapshot() const override;
  Stall stall() const override;

  std::optional<std::string> never_fits(std::uint32_t prompt_tokens, std::uint32_t max_tokens) const override;
  const Effects& transfers_landed(std::int64_t now_ns) override;
  // An idle loop polls the copies of the host tier; within a step they land when the scheduler polls.
  std::int64_t next_landing_ns() const override;
  void finish_transfers() override;
  bool has_transfers() const override { return scheduler_.host() != nullptr && !scheduler_.host()->is_idle(); }
  void take_events(TimedEvents& out) override;
  const Residency& residency() const override { return *this; }
  std::size_t cached_prefix(std::span<const BlockIdentity> blocks) const override;
  std::size_t published_prefix(std::span<const BlockIdentity> blocks, std::size_t known) override;
  void keep_times() override {
    token_log_.keep_gaps();
    links_.keep_times();
  }
  void take_gaps(GapSum& out) override { token_log_.take_gaps(out); }
  std::vector<EngineSample> samples() const override { return token_log_.samples(); }
  void watch_steps(bool on) override {
    watches_steps_ = on;
    view_.clear();
  }
  void describe_step(StepView& out) const override;
  TierReport tier_report() override;
  SglangTokens tokens() const;
  void set_admitting(bool on) override;
  bool drained() const override { return !in_step() && !planned_.batch && scheduler_.drained(); }
  // Evicts all that no request holds, as under pressure: HiCache keeps or takes a copy.
  void forget_cache(std::int64_t now_ns) override;
  // Slows the links to and from the host; copies that are submitted already keep their times.
  void set_link_share(std::int64_t now_ns, Tier tier, double share) override;
  void set_slowdown(double factor) override { timing_.slowdown = factor; }
  std::vector<std::int64_t> gaps_of(RequestId id) const override;
  void check() override;
  StateDigest digest(bool with_cached) const override;

 private:
  struct Live {
    RequestSpec spec;
    RequestRecord record;
    std::vector<BlockIdentity> names;
    TokenRuns tokens;       // steps in which it got them
    bool reported = false;  // its record was returned when it was cancelled
  };
  // A batch with the times of the copies that it waits for.
  struct Planned {
    std::unique_ptr<SglangBatch> batch;
    std::int64_t written_ns = 0;
    std::int64_t loaded_ns = 0;
  };
  using Names = std::unordered_map<std::uint64_t, BlockIdentity>;  // by sequence hash

  // Residency: the device, and the host if there is one, as published.
  std::size_t num_pools() const noexcept override { return scheduler_.host() == nullptr ? 1 : 2; }
  Tier tier(std::size_t pool) const override { return pool == 0 ? Tier::G1 : Tier::G2; }
  std::size_t num_hashes() const override { return published_[0].size() + published_[1].size(); }
  void has_blocks(std::size_t pool, std::span<const BlockIdentity> blocks, bool* out) const override;
  std::vector<BlockIdentity> resident(std::size_t pool) const override;

  bool keeps_events() const noexcept { return config_.events || config_.check; }
  void changed(RadixNode& node, bool stored, RadixTier tier);
  void publish(std::int64_t now_ns);
  void publish_after(SglangMode mode, std::int64_t now_ns);
  bool in_step() const noexcept { return open_.batch || waits_; }
  bool is_idle() const { return !in_step() && !planned_.batch && scheduler_.empty() && aborts_.empty(); }

  std::uint64_t capacity_tokens() const noexcept { return config_.num_gpu_blocks * config_.block_size; }
  bool fast_forward(std::int64_t until_ns);
  Planned schedule(std::int64_t now_ns);
  StepLoad load_of(const SglangBatch& batch) const;
  void add_to(StepLoad& load, const SglangBatch::Row& row, const SglangBatch& batch) const;
  void view_batch(const SglangBatch& batch, const StepLoad& load, std::int64_t duration_ns);
  void apply_log(std::int64_t now_ns);
  void add_token(Live& live, std::int64_t now_ns);
  void finish(RequestId id, FinishReason reason, std::int64_t now_ns);
  void forget_ended();
  void fold_token_log();
  void poll_host(std::int64_t now_ns);
  void iterate_idle(std::int64_t now_ns);
  void describe_side_stall(Stall& stall) const;
  std::int64_t next_call_ns() const;
  void sample(std::int64_t now_ns);
  Phase phase() const;
  Effects& fresh();
  const Effects& done();

  SglangConfig config_;
  StepTiming timing_;
  HostLinks links_;
  std::optional<PushPort> port_;  // of one side of a disaggregated server
  SglangScheduler scheduler_;
  std::unordered_map<RequestId, Live> live_;
  std::vector<RequestId> aborts_;  // not received yet
  std::vector<RequestId> ended_;   // the scheduler may still have them in a batch
  Planned open_;
  Planned planned_;  // overlap: the batch behind the open one
  std::int64_t now_ns_ = 0;
  std::int64_t empty_since_ns_ = 0;
  bool stalled_ = false;
  bool sleeps_ = false;  // until the other side of a disaggregated server, or the link, has something new
  bool waits_ = false;   // a step without a batch is open: it ends when a copy of the host tier has landed
  bool reports_batches_;
  bool fast_forwards_;
  bool advancing_ = false;  // effects of several steps are collected
  bool forwarded_ = false;  // the open step was begun by a fast-forward
  std::function<void(Engine&, bool ended)> on_step_;
  bool watches_steps_;
  StepView view_;  // for describe_step: the open batch, and decisions since the last step began
  std::function<void(Engine&, bool fast_forwarded)> on_checkpoint_;
  Effects effects_;
  EngineTotals totals_;
  std::uint64_t stored_pages_ = 0;
  std::uint64_t removed_pages_ = 0;
  TokenLog token_log_;

  std::array<Names, 2> published_;  // pages on the device and on the host, if events are kept
  EventRecords unpublished_;        // since SGLang last published
  PublishedPages pages_;            // on the device, if routers read them
  TimedEvents events_;
  EventTruth truth_;  // with `check`: an index that knows only published events
  std::uint64_t next_event_ = 1;
  std::uint64_t decode_results_ = 0;
};

}  // namespace understudy
