// TensorRT-LLM's executor loop and scheduler, one pass per call, without a clock.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/trtllm/config.hpp"
#include "engine/trtllm/request.hpp"

namespace understudy {

struct TrtBatch {
  struct Chunk {
    TrtRequest* request;
    std::uint32_t position;
    std::uint32_t tokens;
    bool is_last;
  };
  std::vector<Chunk> contexts;
  std::vector<TrtRequest*> generation;

  bool empty() const noexcept { return contexts.empty() && generation.empty(); }
};

// What a pass did.
struct TrtLog {
  struct Reuse {
    RequestId request;
    std::uint32_t matched;
    std::uint32_t looked_up;
  };
  std::vector<RequestId> activated;  // left the waiting queue
  std::vector<Reuse> matched;        // got a cache
  std::vector<RequestId> suspended;
  std::vector<RequestId> recomputed;
  std::vector<RequestId> sampled;
  std::vector<RequestId> answered;
  std::vector<RequestId> finished;
  std::vector<RequestId> dropped;  // cancelled while they waited
  bool processed = false;          // a batch was answered: events are published

  void clear() { *this = TrtLog{}; }
};

class TrtExecutor {
 public:
  TrtExecutor(const TrtSettings& settings, bool events);
  TrtExecutor(const TrtExecutor&) = delete;
  TrtExecutor& operator=(const TrtExecutor&) = delete;

  void submit(TrtArrival arrival);
  // Takes effect where answers are made.
  void cancel(RequestId id) { cancelled_.push_back(id); }

  // A pass in two halves: `schedule` forms a batch, which a driver may read, and `finish` does the rest. False: the
  // scheduler found that no request can ever go on, where the real server dies.
  bool schedule();
  // Where pages run out in the middle of a commit, the real server dies as well: is_dead.
  void finish();

  void set_admitting(bool on) noexcept { admitting_ = on; }
  bool has_cancels() const noexcept { return !cancelled_.empty(); }
  void drop_cancels() noexcept { cancelled_.clear(); }
  // The request whose blocks are committed now; null: none.
  const TrtRequest* committing() const noexcept { return committing_; }
  // Most outputs of a request until one may end, whatever arrives.
  std::uint32_t fewest_outputs_left() const;

  // ── Plain decode: all active requests are in every batch, and memory suffices ──
  // Requests by the number of steps until they need a page.
  using DecodePhases = std::vector<std::vector<TrtRequest*>>;
  bool decodes_plainly() const;
  std::uint32_t decodes_before_end() const;
  DecodePhases begin_decodes() const;
  bool has_room_to_decode() const;
  // Gives pages to the requests that need one in a step.
  bool decode(const DecodePhases& phases, std::uint32_t step);
  void end_decodes(std::uint32_t steps);

  const TrtBatch& batch() const noexcept { return batch_; }
  const std::optional<TrtBatch>& previous() const noexcept { return previous_; }
  TrtLog& log() noexcept { return log_; }
  bool is_dead() const noexcept { return dead_; }
  std::size_t stuck() const noexcept { return stuck_; }
  const std::string& death() const noexcept { return death_; }  // why it is dead, unless it is stuck
  const std::vector<TrtRequest*>& active() const noexcept { return active_; }
  const std::vector<TrtRequest*>& waiting() const noexcept { return waiting_; }
  bool is_idle() const noexcept { return active_.empty() && waiting_.empty(); }
  std::vector<const TrtRequest*> with_caches() const;
  const TrtRequest& request(RequestId id) const { return *requests_.at(id); }
  bool knows(RequestId id) const { return requests_.contains(id); }
  void forget(RequestId id) { requests_.erase(id); }
  TrtStore& store() noexcept { return store_; }
  const TrtStore& store() const noexcept { return store_; }
  TrtTree& tree() noexcept { return tree_; }
  const TrtTree& tree() const noexcept { return tree_; }
  TrtEvents* events() noexcept { return events_.get(); }
  const TrtMemory& memory() const noexcept { return memory_; }
  const TrtSettings& settings() const noexcept { return settings_; }
  void check() const;

 private:
  // Requests of a pass, and those whose memory was taken.
  struct Pass {
    std::vector<TrtRequest*> order;
    std::size_t end = 0;
    std::size_t frontier = 0;  // of recompute pauses
    std::vector<bool> victims;
    std::vector<TrtRequest*> suspended;
    std::vector<TrtRequest*> recomputed;
    std::uint32_t tokens = 0;
  };
  enum class Step : std::uint8_t { Scheduled, Skip, Stop };

  void finish_pass();
  void fetch();
  bool plan();
  std::vector<TrtRequest*> schedule_generation(Pass& pass);
  void schedule_contexts(Pass& pass, const std::vector<TrtRequest*>& aside);
  bool allocate(TrtRequest& request);
  bool suspend_others(Pass& pass, std::size_t at);
  bool recompute_others(Pass& pass, std::size_t at);
  std::optional<std::size_t> find_victim(const Pass& pass, std::size_t at) const;
  void suspend(Pass& pass, TrtRequest& request);
  Step take_whole(TrtRequest& request, std::uint32_t& used);
  Step take_chunk(TrtRequest& request, std::uint32_t& used);
  bool prepare(TrtRequest& request);
  bool grow_context(TrtRequest& request, std::uint32_t tokens);
  void wait_for_batch();

  void free_cache(TrtRequest& request);
  void pause_recomputed();
  void advance_contexts();
  void sample(const TrtBatch& batch);
  void commit_contexts();
  void answer(const TrtBatch& batch);
  void apply_cancels();

  TrtSettings settings_;
  TrtMemory memory_;
  std::uint32_t chunk_unit_;
  TrtStore store_;
  std::unique_ptr<TrtEvents> events_;
  TrtTree tree_;
  std::unordered_map<RequestId, std::unique_ptr<TrtRequest>> requests_;
  std::vector<TrtRequest*> waiting_;
  std::vector<TrtRequest*> active_;
  std::vector<RequestId> cancelled_;
  std::vector<TrtRequest*> recomputed_;  // in this pass
  TrtBatch batch_;
  std::optional<TrtBatch> previous_;  // with overlap: not answered yet
  std::uint32_t waited_ = 0;
  std::uint64_t caches_ = 0;
  const TrtRequest* committing_ = nullptr;
  bool admitting_ = true;
  std::uint32_t length_limit_;
  bool dead_ = false;
  std::size_t stuck_ = 0;
  std::string death_;
  TrtLog log_;
};

}  // namespace understudy
