// KV blocks of one request in a real engine: schedule what a step writes, view it, apply what it computed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "store/block_store.hpp"
#include "tokens/token_blocks.hpp"

namespace understudy {

// Blocks that a request holds at its peak: its last output token is sampled but never written.
std::uint64_t lifetime_blocks(std::uint64_t prompt_tokens, std::uint64_t max_output_tokens, std::uint64_t block_size);

// A state machine, idle → scheduled → idle. Only schedule calls allocate: exactly the blocks that the step writes, all
// or none. Apply registers a block once all its rows are computed. Every call checks first and throws with nothing
// changed. Destruction in any state releases every block.
class RequestKv {
 public:
  enum class State : std::uint8_t { Idle, PrefillScheduled, DecodeScheduled, SpeculativeScheduled, Closed };

  struct Outcome {
    std::size_t blocks_registered = 0;
    bool finished = false;  // the output budget is used up
  };

  // `register_blocks` off: nothing is shared or cached, and match_prefix finds nothing.
  RequestKv(std::shared_ptr<BlockStore> store, std::size_t pool, TokenBlocks prompt, std::uint64_t max_output_tokens,
            bool register_blocks);
  ~RequestKv() { close(); }
  RequestKv(const RequestKv&) = delete;
  RequestKv& operator=(const RequestKv&) = delete;

  // ── Schedule ──
  // Before anything is computed: references cached blocks, leaving at least one token to compute. Returns cached
  // tokens.
  std::size_t match_prefix();
  void schedule_prefill(std::size_t tokens);
  void schedule_decode();
  // Schedules up to `tokens` rows (the dangling token and drafts) within the output budget; returns how many.
  std::size_t schedule_speculative(std::size_t tokens);
  // While a decode is scheduled: also allocates the block of the following decode, if it needs one, so that an engine
  // can prepare its next step while this one runs. Returns false with nothing taken when the output ends before.
  bool schedule_ahead();
  void revert();  // also releases what was allocated ahead

  // ── View ──
  std::size_t scheduled_tokens() const noexcept { return scheduled_; }
  std::size_t view_length() const;  // tokens with rows after the scheduled step; WrongState unless scheduled
  std::span<const SlotId> pages() const noexcept { return slots_; }

  // ── Apply ──
  Outcome apply_prefill(std::optional<Token> token);
  Outcome apply_decode(Token token);
  Outcome apply_speculative(std::span<const Token> accepted);

  // ── Release ──
  // Releases every block and starts over: all tokens known so far become the prompt of the next prefill.
  void preempt();
  void close() noexcept;

  State state() const noexcept { return state_; }
  const TokenBlocks& tokens() const noexcept { return tokens_; }
  std::size_t prompt_tokens() const noexcept { return prompt_; }
  std::size_t prefill_target() const noexcept { return target_; }
  std::size_t computed_tokens() const noexcept { return computed_; }
  std::size_t cached_tokens() const noexcept { return cached_; }
  std::size_t generated_tokens() const noexcept { return tokens_.size() - prompt_; }
  std::uint64_t max_output_tokens() const noexcept { return max_output_; }
  bool finished() const noexcept { return generated_tokens() >= max_output_ && computed_ >= target_; }
  std::size_t registered_blocks() const noexcept { return registered_; }
  std::size_t held_blocks() const noexcept { return slots_.size(); }

 private:
  void require(State state, const char* call) const;
  void require_decode_ready(const char* call) const;
  void begin(State state, std::size_t tokens);
  Outcome computed(std::size_t tokens, std::span<const Token> sampled);
  std::size_t register_computed();

  std::shared_ptr<BlockStore> store_;
  std::size_t pool_;
  TokenBlocks tokens_;  // prompt, then sampled tokens; the newest is dangling: known, not computed
  std::size_t prompt_;
  std::size_t target_;  // prefill is complete at this length
  std::uint64_t max_output_;
  bool register_blocks_;

  State state_ = State::Idle;
  std::size_t computed_ = 0;    // tokens whose rows exist
  std::size_t cached_ = 0;      // of them, taken from the cache
  std::size_t registered_ = 0;  // leading blocks of slots_ that are registered
  std::size_t scheduled_ = 0;   // rows that the scheduled step writes
  std::size_t allocated_ = 0;   // blocks that the scheduled step allocated
  std::size_t ahead_ = 0;       // last blocks of slots_ that belong to the decode after the scheduled one
  std::vector<SlotId> slots_;   // in position order
};

const char* name_of(RequestKv::State state) noexcept;

}  // namespace understudy
