// A simulated TensorRT-LLM engine: its executor on a clock.
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
#include "engine/trtllm/executor.hpp"

namespace understudy {

struct TrtConfig final : EngineConfig {
  TrtSettings settings;
  double host_gbps = 50;  // of copies between device and host
  double disk_gbps = 5;
  std::size_t event_buffer_size = 0;  // TensorRT-LLM's own events until they are taken, the latest; 0: none
  bool dies = false;                  // raises where the real server ends, instead of standing still

  std::unique_ptr<Engine> make(const EngineSite& site) const override;
  std::shared_ptr<EngineConfig> clone() const override { return std::make_shared<TrtConfig>(*this); }
  bool reads_identities() const noexcept override { return settings.enable_block_reuse; }
  bool publishes_below_device() const noexcept override { return true; }
};

// A batch, as iteration statistics count it.
struct TrtIteration {
  std::int64_t duration_ns = 0;
  std::uint32_t contexts = 0;
  std::uint64_t context_tokens = 0;
  std::uint64_t context_kv_tokens = 0;  // before these, of the same prompts
  std::uint32_t generation = 0;
  std::uint64_t generation_kv_tokens = 0;
  std::uint32_t paused = 0;  // suspended, or to be computed again
};

// A step is a batch. Without overlap a pass is formed when it begins and finished when it ends. With overlap the pass
// behind is formed when a batch begins, and finished when that batch has its results; so a request that is submitted
// while batch s runs is computed in batch s + 2 at the earliest.
class TrtEngine final : public Engine, private Residency, private TrtWatcher {
 public:
  TrtEngine(const TrtConfig& config, const EngineSite& site);

  const Effects& submit(RequestSpec spec, std::int64_t now_ns) override;
  // The request is answered now; its pages are freed when the next batch is answered.
  const Effects& cancel(RequestId id, std::int64_t now_ns) override;
  const Effects& begin_step(std::int64_t now_ns) override;
  const Effects& end_step(std::int64_t end_ns) override;
  const Effects& advance(std::int64_t until_ns, const AdvanceOptions& options) override;
  std::int64_t next_visible_ns() const override;
  EngineSnapshot snapshot() const override;

  std::optional<std::string> never_fits(std::uint32_t prompt_tokens, std::uint32_t max_tokens) const override;
  Stall stall() const override;
  void take_events(TimedEvents& out) override;
  const Residency& residency() const override { return *this; }
  std::size_t cached_prefix(std::span<const BlockIdentity> blocks) const override;
  std::size_t published_prefix(std::span<const BlockIdentity> blocks, std::size_t known) override;
  void keep_times() override { token_log_.keep_gaps(); }
  void take_gaps(GapSum& out) override { token_log_.take_gaps(out); }
  std::vector<EngineSample> samples() const override { return token_log_.samples(); }
  void watch_steps(bool on) override {
    watches_steps_ = on;
    view_.clear();
  }
  void describe_step(StepView& out) const override;
  TierReport tier_report() override;
  void set_admitting(bool on) override;
  bool drained() const override { return !open_ && executor_.active().empty(); }
  void forget_cache(std::int64_t now_ns) override;
  void set_slowdown(double factor) override { timing_.slowdown = factor; }
  std::vector<std::int64_t> gaps_of(RequestId id) const override;
  void check() override;
  StateDigest digest(bool with_cached) const override;

  // The batch of the last step that began.
  TrtIteration iteration() const { return iteration_; }
  // Events since the last call, of passes that answered a batch.
  std::vector<TrtEvent> take_cache_events();

 private:
  struct Live {
    RequestSpec spec;
    RequestRecord record;
    std::vector<BlockIdentity> names;
    TokenRuns tokens;       // steps in which it got them
    bool reported = false;  // its record was returned when it was cancelled
  };
  using Names = std::unordered_map<std::uint64_t, BlockIdentity>;  // by sequence hash

  // Residency: every level, as published.
  std::size_t num_pools() const noexcept override { return published_.size(); }
  Tier tier(std::size_t pool) const override;
  std::size_t num_hashes() const override;
  void has_blocks(std::size_t pool, std::span<const BlockIdentity> blocks, bool* out) const override;
  std::vector<BlockIdentity> resident(std::size_t pool) const override;
  // TrtWatcher.
  void stored(TrtNode& node, std::size_t level) override { changed(node, level, true); }
  void removed(TrtNode& node, std::size_t level) override { changed(node, level, false); }
  void changed(TrtNode& node, std::size_t level, bool is_stored);
  void publish(std::int64_t now_ns);
  void flush_cache_events();

  std::uint64_t capacity_tokens() const noexcept { return config_.num_gpu_blocks * config_.block_size; }
  void die_if_dead() const;
  bool is_idle() const { return !open_ && !planned_load_ && executor_.is_idle(); }
  bool fast_forward(std::int64_t until_ns);
  bool plan_pass(std::int64_t now_ns);
  bool run_empty_passes(std::int64_t now_ns);
  void count_batch();
  void note_admissions(std::int64_t now_ns);
  std::optional<StepLoad> load_of(const TrtBatch& batch) const;
  void view_batch(const TrtBatch& batch, const StepLoad& load, std::int64_t duration_ns);
  std::int64_t take_copies_ns();
  void apply_log(std::int64_t now_ns);
  void add_token(Live& live, std::int64_t now_ns);
  void finish(RequestId id, FinishReason reason, std::int64_t now_ns);
  void forget_ended();
  void fold_token_log();
  void sample(std::int64_t now_ns);
  Phase phase() const;
  Effects& fresh();
  const Effects& done();

  TrtConfig config_;
  StepTiming timing_;
  TrtExecutor executor_;
  std::unordered_map<RequestId, Live> live_;
  std::vector<RequestId> ended_;  // a batch may still refer to them
  bool open_ = false;
  bool pass_is_open_ = false;             // it is planned, and not finished
  std::optional<StepLoad> planned_load_;  // of the next batch; nothing: no batch
  std::int64_t planned_copies_ns_ = 0;    // copies that it waits for
  TrtIteration planned_iteration_;
  TrtIteration iteration_;
  std::int64_t now_ns_ = 0;
  bool stalled_ = false;
  bool reports_batches_;
  bool fast_forwards_;
  bool knows_tokens_ = false;  // of its requests; a block is found by its tokens then, not by its name
  bool advancing_ = false;
  bool forwarded_ = false;
  std::function<void(Engine&, bool ended)> on_step_;
  bool watches_steps_;
  StepView view_;
  StepView planned_view_;  // of the next batch
  std::function<void(Engine&, bool fast_forwarded)> on_checkpoint_;
  Effects effects_;
  EngineTotals totals_;
  std::vector<std::uint64_t> stored_blocks_;   // by level
  std::vector<std::uint64_t> removed_blocks_;  // by level
  std::uint64_t moved_down_ = 0;
  std::uint64_t moved_up_ = 0;
  TokenLog token_log_;

  std::vector<Names> published_;  // by level
  EventRecords unpublished_;
  TimedEvents events_;
  EventTruth truth_;  // with `check`: an index that knows only published events
  std::uint64_t next_event_ = 1;
  std::vector<TrtEvent> cache_events_;
};

}  // namespace understudy
