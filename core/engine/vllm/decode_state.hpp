// The state of an engine that a fast-forward reads and advances, and the calls that it makes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/announcer.hpp"
#include "engine/engine.hpp"
#include "engine/timing.hpp"
#include "engine/token_log.hpp"
#include "engine/vllm/admission.hpp"
#include "engine/vllm/batch.hpp"
#include "engine/vllm/config.hpp"
#include "engine/vllm/groups/block_groups.hpp"
#include "engine/vllm/kv_backend.hpp"
#include "engine/vllm/scheduler_state.hpp"
#include "tiers/worker_tiers.hpp"

namespace understudy {

struct StepClock {
  static constexpr std::int64_t kLatestNs = std::int64_t{1} << 62;  // steps begin until then

  std::int64_t now_ns = 0;    // the end of the open step, else when the next may begin
  std::int64_t begun_ns = 0;  // when the last step began
  bool in_step = false;
};

// The requests that decode, and everything that a decode step changes. The engine fills it in once.
struct DecodeState {
  // Settings and parts.
  const VllmConfig& config;
  const StepTiming& timing;
  std::uint64_t capacity_tokens;
  KvBackend& kv;
  GroupedBackend* grouped;  // the same, if there are several KV cache groups; else null
  WorkerTiers* tiers;       // null: none
  Announcer& announcer;
  TokenLog& token_log;
  bool offloads;  // vLLM's own offload is on
  bool fenced;    // steps that computed a token are counted

  // Requests.
  std::vector<EngineRequest>& requests;  // by slot
  std::vector<RequestSlot>& running;
  const WaitingQueues& waiting;
  Refusal& refusal;
  Batch& planned;  // asynchronously: the batch behind the open one

  // Results.
  StepClock& clock;
  StepCounts& counts;
  EngineTotals& totals;
  std::vector<NewTokens>& tokens;

  std::size_t max_running() const noexcept { return std::min(config.max_num_seqs, config.max_num_active_seqs); }
  std::uint32_t outputs_left(const EngineRequest& request) const noexcept {
    return std::min(request.spec.outputs() - request.outputs(), config.max_model_len - request.known);
  }
  // Whether `blocks` blocks can be taken without waiting or preempting.
  bool has_room(std::uint64_t blocks) const { return kv.has_room(blocks, tiers); }
};

// Decisions and results that are the engine's own.
class DecodeHost {
 public:
  // Transfers that end by `now_ns` have landed. True: an ordinary step must decide what follows.
  virtual bool landed(std::int64_t now_ns) = 0;
  virtual void notice_landings(std::int64_t now_ns) = 0;
  // Whether blocks freed since the last attempt may admit the head of the queue.
  virtual bool head_may_move() const = 0;
  // Whether the head of the queue stays queued while other requests take blocks.
  virtual bool head_stays() const = 0;

  // A step ends: `filled` has requests whose block is complete. May throw: then there was no such step.
  virtual void offload_computed(const std::vector<Scheduled>& filled, std::int64_t end_ns) = 0;
  // The request has its last token.
  virtual void finish(RequestSlot slot, std::int64_t end_ns) = 0;
  // vLLM's offload: store what the step computed; and report transfers that are done. False: there was none.
  virtual void offload_after_step(std::int64_t end_ns) = 0;
  virtual bool report_offloads(std::int64_t end_ns) = 0;
  // The state of lower tiers may have changed since the last sample.
  virtual bool changed_below() const = 0;
  virtual void sample(std::size_t running, std::int64_t time_ns) = 0;

  virtual void fold_token_log() = 0;
  // Requests have been updated by this many steps.
  virtual void progressed(std::uint64_t steps) = 0;

 protected:
  ~DecodeHost() = default;
};

}  // namespace understudy
