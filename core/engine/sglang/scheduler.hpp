// SGLang's scheduler, iteration by iteration: receive, schedule, run, process the result.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/sglang/config.hpp"
#include "engine/sglang/request.hpp"
#include "engine/sglang/state_component.hpp"
#include "engine/sglang/window_component.hpp"

namespace understudy {

// Decisions and results of an iteration, in order.
struct SglangLog {
  struct Admission {
    RequestId request = 0;
    bool resumed = false;
    std::uint32_t cached = 0;
    std::uint32_t loaded = 0;  // part of them: from the host
  };
  std::vector<Admission> admitted;
  std::vector<RequestId> retracted;
  std::vector<RequestId> preempted;
  std::vector<RequestId> finished;
  std::vector<RequestId> aborted;
  std::vector<RequestId> sampled;  // got a token

  // On the decode side of a disaggregated server.
  struct Allocation {
    RequestId request = 0;
    std::uint32_t pages = 0;  // to transfer
    std::uint32_t prefix = 0;
  };
  std::vector<RequestId> resumed;
  std::vector<Allocation> allocated;
  std::vector<RequestId> arrived;
  std::vector<RequestId> joined;

  void clear() {
    resumed.clear();
    allocated.clear();
    arrived.clear();
    joined.clear();
    admitted.clear();
    retracted.clear();
    preempted.clear();
    finished.clear();
    aborted.clear();
    sampled.clear();
  }
};

struct SglangArrival {
  RequestId id = 0;
  TokenList prompt;
  std::uint32_t max_tokens = 0;
  TokenList outputs;               // the first ones, where they are known
  std::uint64_t first_output = 0;  // others are consecutive from here on
  std::uint32_t eos_at = 0;
  std::optional<std::int64_t> priority;
};

class SglangScheduler {
 public:
  static constexpr std::uint64_t kEos = 2;

  // `transfers` times copies of the host tier, if there is one; `transport` is the way to the other side of a
  // disaggregated server.
  SglangScheduler(const SglangSettings& settings, const RadixTree::OnChange& on_change,
                  HostTransfers* transfers = nullptr, SglangTransport* transport = nullptr);

  // ── Receive ──
  void submit(SglangArrival arrival);
  void abort(std::span<const RequestId> ids);

  // ── Schedule and results ──
  // The batch to run, or null. Throws CapacityExhausted when the pool is too small for it: SGLang exits.
  std::unique_ptr<SglangBatch> schedule();
  void process(const SglangBatch& batch);
  // The iteration has ended; `idle`: it launched no batch and processed no result.
  void end_iteration(bool idle);
  // While off, waiting requests stay in the queue; those that hold memory go on.
  void set_admitting(bool on) noexcept { admitting_ = on; }
  // Evicts every cached token that no request holds. A host tier keeps its copies.
  void forget_cached();
  // Overlap: the batch whose result is processed after the next schedule.
  void set_outstanding(const SglangBatch* batch) noexcept;

  // ── Fast-forward over plain decode ──
  struct DecodeRun {
    std::vector<std::uint32_t> new_pages;  // requests that begin a page in a step, by step modulo the page size
    std::uint32_t steps = 0;
  };
  // Whether the next steps decode the running requests and do nothing else, given the open batch and the one behind.
  bool decodes_plainly(const SglangBatch& open, const SglangBatch* planned) const;
  std::uint32_t decodes_before_end() const;  // steps until a request ends, or is known to end
  DecodeRun begin_decodes() const;
  bool has_room_for(const DecodeRun& run) const;  // one more step evicts nothing
  bool schedule_decode(DecodeRun& run);           // true: it took memory
  void end_decodes(const DecodeRun& run);         // gives every request its outputs

  // ── Watch ──
  SglangLog& log() noexcept { return log_; }
  std::int64_t avail() const noexcept { return avail_; }
  double ratio() const noexcept { return ratio_; }
  bool is_full() const noexcept { return full_; }
  const SglangRequest* chunked() const noexcept { return chunked_; }
  const std::vector<SglangRequest*>& running() const noexcept { return running_; }
  const std::vector<SglangRequest*>& waiting() const noexcept { return waiting_; }
  RadixTree& tree() noexcept { return tree_; }
  const RadixTree& tree() const noexcept { return tree_; }
  HostCache* host() noexcept { return host_.get(); }
  const HostCache* host() const noexcept { return host_.get(); }
  const WindowComponent* window() const noexcept { return window_.get(); }
  const StateComponent* states() const noexcept { return states_.get(); }
  // The one of the two that there is, or null.
  const RadixComponent* component() const noexcept {
    return window_ ? static_cast<const RadixComponent*>(window_.get()) : states_.get();
  }
  const SglangSide& side() const noexcept { return side_; }
  // Requests without memory, and pages of prompts that are on their way to a decode server.
  std::size_t num_waiting() const noexcept;
  std::uint64_t pages_in_flight() const noexcept;
  // Numbers that change when an iteration without a batch has done something.
  std::array<std::size_t, 8> side_counts() const noexcept;
  // The last schedule looked at all transfers.
  bool has_polled() const noexcept { return has_polled_; }
  // Nothing that is on its way can help the first request that waits.
  bool is_side_stuck() const noexcept;
  // The next iterations decode, and neither allocate nor resume anything.
  bool only_decodes() const noexcept;
  // Decode side: steps for which memory certainly suffices, also for requests on their way.
  std::int64_t steps_with_room() const noexcept;
  std::uint32_t free_slots() const noexcept { return free_slots_; }
  // Free tokens of the smaller pool.
  std::int64_t free_tokens() const noexcept { return window_ ? std::min(avail_, window_->free()) : avail_; }
  // Neither a request nor a copy of the host tier is left.
  bool is_idle() const { return empty() && (!host_ || host_->is_idle()); }
  // No request is left that has not ended.
  bool empty() const { return waiting_.empty() && side_.empty() && drained(); }
  bool drained() const;  // no unfinished request holds memory
  // Whether the last schedule knew of a waiting request.
  bool has_seen(const SglangRequest& request) const noexcept { return request.entered <= seen_entries_; }
  const SglangRequest& request(RequestId id) const { return *requests_.at(id); }
  const SglangBatch* last() const noexcept { return last_.get(); }
  void forget(RequestId id);  // one that has ended, and is in no batch
  bool knows(RequestId id) const { return requests_.contains(id); }
  bool holds(RequestId id) const;                                         // running, chunked or in the last batch
  const SglangRequest* inserting() const noexcept { return inserting_; }  // whose tokens go into the tree now
  // The least number of outputs after which a request ends; 0: one may end without an output.
  std::uint32_t fewest_outputs_left() const;
  bool defers_prefill() const noexcept { return interval_left_ > 0; }
  // Prompt and output tokens of retracted requests, summed over all retractions.
  std::uint64_t retracted_inputs() const noexcept { return retracted_inputs_; }
  std::uint64_t retracted_outputs() const noexcept { return retracted_outputs_; }
  void check() const;

 private:
  enum class Verdict : std::uint8_t { Go, Stop, Full };
  // Budgets of a prefill batch that is being formed.
  struct Budget {
    double total = 0;      // tokens that running and added requests will need
    std::int64_t now = 0;  // tokens that they need at once
    std::int64_t window = 0;
    std::int64_t input = 0;
    std::optional<std::int64_t> chunk;
    struct Share {  // §5.1
      std::int64_t left;
      std::int64_t held;
    };
    std::vector<Share> shares;
    bool has_shares = false;
  };

  std::uint32_t page() const noexcept { return settings_.page_size; }
  std::int64_t up(std::int64_t n) const noexcept { return (n + page() - 1) / page() * page(); }
  std::int64_t down(std::int64_t n) const noexcept { return n / page() * page(); }
  bool has_cache() const noexcept { return !settings_.disable_radix_cache; }
  bool chunks() const noexcept { return settings_.chunked_prefill_size > 0; }
  bool mixes() const noexcept { return settings_.enable_mixed_chunk && chunks(); }
  bool preempts() const noexcept {
    return settings_.enable_priority_scheduling && !settings_.disable_priority_preemption;
  }
  std::int64_t sign() const noexcept { return settings_.schedule_low_priority_values_first ? 1 : -1; }
  std::int64_t clipped(std::int64_t tokens) const {
    return std::min<std::int64_t>(tokens, settings_.clip_max_new_tokens);
  }
  std::int64_t evictable() const { return has_cache() ? static_cast<std::int64_t>(tree_.evictable()) : 0; }

  // receive
  void enqueue(SglangRequest* request);
  void report_abort(SglangRequest* request);
  void abort_on_side(SglangRequest& request);
  void abort_transfers(const std::function<bool(const SglangRequest*)>& matches);

  // schedule.cpp
  std::unique_ptr<SglangBatch> next_batch();
  void take_over_last();
  void drop_finished();

  // prefill.cpp
  std::unique_ptr<SglangBatch> form_prefill();
  double share_of(const SglangRequest& request) const;
  double left_total(const Budget& budget) const { return static_cast<double>(avail_ + evictable()) - budget.total; }
  std::int64_t left_now(const Budget& budget) const { return avail_ + evictable() - budget.now; }
  void charge(Budget& budget, std::int64_t tokens, std::int64_t outputs) const;
  Verdict verdict(const Budget& budget) const;
  void add_chunked(SglangBatch& batch, Budget& budget);
  Verdict try_to_add(SglangRequest* request, SglangBatch& batch, Budget& budget);
  Verdict try_without_cache(SglangRequest* request, SglangBatch& batch, Budget& budget);
  Verdict add_without_cache(SglangRequest* request, SglangBatch& batch, Budget& budget);
  Verdict add_piece(SglangRequest* request, const RadixMatch& match, SglangBatch& batch, Budget& budget);
  void add(SglangRequest* request, SglangBatch& batch, std::uint32_t tokens, bool stays_chunked);
  bool preempt_for(const SglangRequest& request, Budget& budget);
  void allocate_prefill(SglangBatch& batch);
  void mix_in(SglangBatch& batch);

  // queue_order.cpp
  void order_queue();
  bool order_by_prefix();
  void order_by_weight(const std::vector<RadixNode*>& nodes);
  void refresh_waiting();

  // prefill_side.cpp
  std::unique_ptr<SglangBatch> next_prefill_batch();
  void take_bootstrapped();
  void send(SglangRequest& request, std::uint32_t end, bool last);
  void process_prefill_side(const SglangBatch& batch);
  void take_arrived();
  void end_on_side(SglangRequest* request, bool failed);
  void free_buffer(SglangRequest& request);

  // decode_side.cpp
  std::unique_ptr<SglangBatch> next_decode_batch();
  void poll_decode_side();
  void resume_retracted();
  void allocate_for_transfers();
  void take_transferred();
  void join_arrived();
  std::int64_t decode_budget(std::optional<std::int64_t> retractable, std::size_t more) const;
  void preallocate(SglangRequest& request, std::uint32_t prefix);
  std::uint64_t backup_tokens(const SglangRequest& request) const;
  bool back_up(const SglangRequest& request);
  void drop_backup(const SglangRequest& request);

  // window.cpp
  std::int64_t left_window(const Budget& budget) const;
  std::int64_t window_need(std::int64_t tokens, std::int64_t outputs, std::optional<std::int64_t> chunk) const;
  std::optional<std::int64_t> chunk_within_window(std::int64_t extent, std::int64_t outputs, const Budget& budget,
                                                  bool& fits) const;
  void slide(SglangRequest& request, std::int64_t token);
  void slide_prefills(const SglangBatch& batch);
  void slide_decodes();

  // states.cpp
  bool tracks_states() const noexcept { return settings_.mamba_extra_buffer && has_cache(); }
  bool tracks_lazily() const noexcept { return settings_.mamba_lazy && tracks_states(); }
  void evict_states(std::int64_t slots);
  void take_state_slots(std::int64_t slots);
  void return_second_slot(SglangRequest& request);
  void copy_state(SglangRequest& request, RadixNode& from);
  void return_copy(SglangRequest& request);
  void take_states(const SglangBatch& batch);
  void track_prefills(const SglangBatch& batch);
  void track_decodes();
  void undo_tracking();
  void track_result(const SglangBatch::Row& row);
  bool ends_with_next_output(const SglangRequest& request) const;
  void checkpoint_state(SglangRequest& request, std::uint32_t tokens, bool ends);
  void drop_states(SglangRequest& request);
  void check_components() const;

  // decode.cpp
  std::unique_ptr<SglangBatch> form_decode();
  bool drop_finishing(bool& dropped);
  bool finishing(const SglangRequest& request) const;
  bool fits(std::int64_t& need);
  void allocate_decode(std::int64_t need);
  void retract();
  void withdraw(SglangRequest* request);
  void make_room(std::int64_t tokens);
  void take_tokens(std::int64_t tokens, const char* what);

  // result
  void checkpoint(SglangRequest& request, std::uint32_t tokens, bool ends);
  RadixInsert insert(SglangRequest& request, std::uint32_t tokens);
  void keep(SglangRequest& request);
  void release(SglangRequest& request, bool inserts);
  void append_token(SglangRequest& request);
  bool append_output(SglangRequest& request);
  bool has_ended(const SglangRequest& request) const;

  bool is_side() const noexcept { return settings_.side.role != SglangRole::Unified; }
  bool is_prefill_side() const noexcept { return settings_.side.role == SglangRole::Prefill; }

  SglangSettings settings_;
  RadixTree tree_;
  SglangTransport* transport_;
  SglangSide side_;
  bool has_polled_ = true;
  std::unique_ptr<HostCache> host_;
  std::unique_ptr<WindowComponent> window_;
  std::unique_ptr<StateComponent> states_;
  std::unordered_map<RequestId, std::unique_ptr<SglangRequest>> requests_;
  std::int64_t avail_;
  std::uint32_t free_slots_;
  std::vector<SglangRequest*> waiting_;
  std::vector<SglangRequest*> running_;
  bool full_ = false;
  bool running_is_prefill_only_ = false;  // of all that joined since it was empty, also those that have left
  SglangRequest* chunked_ = nullptr;
  bool chunk_aborted_ = false;
  bool admitting_ = true;
  bool out_of_memory_ = false;
  std::unique_ptr<SglangBatch> last_;  // the batch of the iteration before, or null
  const SglangBatch* outstanding_ = nullptr;
  const SglangRequest* inserting_ = nullptr;
  double ratio_ = 0;
  double init_ratio_ = 0;
  double min_ratio_ = 0;
  double ratio_step_ = 0;
  std::uint64_t entries_ = 0;
  std::uint64_t seen_entries_ = 0;
  std::uint64_t refreshes_ = 0;
  std::uint32_t interval_left_ = 0;
  std::uint64_t retracted_inputs_ = 0;
  std::uint64_t retracted_outputs_ = 0;
  std::vector<SglangRequest*> to_requeue_;  // preempted while a batch is formed
  SglangLog log_;
};

}  // namespace understudy
