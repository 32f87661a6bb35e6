// Settings that every kind of engine has, and the one factory: a kind derives its settings and makes its engine.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>

#include "engine/mocker_settings.hpp"
#include "engine/timing.hpp"
#include "tiers/tier_config.hpp"

namespace understudy {

class Engine;
class GapSum;
class HandOffNet;
class PushNet;
class TierRun;
struct GroupLayout;

// Inputs of an engine from its driver, in addition to its settings.
struct EngineSite {
  StepTiming timing;
  const TierConfig* tiers = nullptr;  // below the device; null: none
  TierRun* run = nullptr;             // state that workers share; null: the engine is alone
  std::string name = "worker";
  std::size_t worker = 0;     // random streams differ by worker
  HandOffNet* net = nullptr;  // carries hand-offs between workers; null: none, or a driver of steps does
  PushNet* pushes = nullptr;  // carries KV that prefill workers push to decode workers; null: none
  GapSum* gaps = nullptr;     // a sum that engines share; null: each keeps its own
  bool keeps_times = false;   // Engine::keep_times
  bool fast_forward = true;
  bool reports_batches = false;  // Effects name admitted and preempted requests, and the tokens of the batch
  // Called for every step that is not fast-forwarded, after it has begun (false) and after it has ended (true).
  std::function<void(Engine& engine, bool ended)> on_step;
  // Called at the end of every step (false) and of every fast-forward (true), for Checkpoints.
  std::function<void(Engine& engine, bool fast_forwarded)> on_checkpoint;
};

struct EngineConfig {
  static constexpr std::uint32_t kUnlimited = std::numeric_limits<std::uint32_t>::max();

  std::uint32_t block_size = 64;
  std::uint64_t num_gpu_blocks = 16384;  // usable ones; vLLM's own count has one more
  std::uint32_t max_num_batched_tokens = 8192;
  std::uint32_t max_model_len = kUnlimited;
  bool enable_prefix_caching = true;
  MockerSettings mocker;

  bool events = false;            // keep KV events until they are taken; none without prefix caching
  bool published_blocks = false;  // keep a step's changes until it ends, for Engine::published_prefix; without tiers
  bool private_names = false;     // without these two no caller asks for blocks by their hashes
  bool kv_trace = false;          // keep a record of every allocation and eviction until it is taken
  bool check = false;             // verify the state after every step, and at both ends of every fast-forward
  // Above 0: every step takes this long, busy or not, and is counted as recordings of schedulers count steps.
  std::int64_t lockstep_ns = 0;

  virtual ~EngineConfig() = default;
  virtual std::unique_ptr<Engine> make(const EngineSite& site) const = 0;
  // One engine of ranks that step together, a site each. ConfigError: this kind has none.
  virtual std::unique_ptr<Engine> make_ranks(std::span<const EngineSite> sites) const;
  virtual std::shared_ptr<EngineConfig> clone() const = 0;

  // Whether requests must name their blocks.
  virtual bool reads_identities() const noexcept { return enable_prefix_caching; }
  // Tokens that a request for `asked` gets: fewer where the real engine cuts it.
  virtual std::uint32_t outputs_of(std::uint32_t prompt_tokens, std::uint32_t asked) const {
    return std::min(asked, max_model_len - std::min(prompt_tokens, max_model_len));
  }
  // Whether names of requests break ties in scheduling order.
  virtual bool orders_by_name() const noexcept { return false; }
  // Tokens behind a block that are part of its identity.
  virtual std::uint32_t hashed_ahead() const noexcept { return 0; }
  // Whether user-defined policies are called, which one run may share between workers.
  virtual bool has_user_policy() const noexcept { return false; }
  // Whether KV events also name blocks below the device.
  virtual bool publishes_below_device() const noexcept { return false; }
  // Whether it is one of two sides that get a request at once, of which the prefill side pushes KV to the other.
  virtual bool pushes() const noexcept { return false; }
  // Sizes and kinds of the cache groups; null: one group of full attention.
  virtual std::shared_ptr<const GroupLayout> group_layout() const { return nullptr; }

 protected:
  EngineConfig() = default;
  EngineConfig(const EngineConfig&) = default;
  EngineConfig& operator=(const EngineConfig&) = default;
};

}  // namespace understudy
