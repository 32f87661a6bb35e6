#include "store/request_kv.hpp"

#include <algorithm>
#include <utility>

#include "base/assert.hpp"

namespace understudy {

namespace {

std::uint64_t ceil_div(std::uint64_t a, std::uint64_t b) noexcept { return (a + b - 1) / b; }

}  // namespace

std::uint64_t lifetime_blocks(std::uint64_t prompt_tokens, std::uint64_t max_output_tokens, std::uint64_t block_size) {
  return ceil_div(prompt_tokens + std::max<std::uint64_t>(max_output_tokens, 1) - 1, block_size);
}

const char* name_of(RequestKv::State state) noexcept {
  constexpr const char* kNames[] = {"idle", "prefill_scheduled", "decode_scheduled", "speculative_scheduled", "closed"};
  return kNames[static_cast<std::size_t>(state)];
}

RequestKv::RequestKv(std::shared_ptr<BlockStore> store, std::size_t pool, TokenBlocks prompt,
                     std::uint64_t max_output_tokens, bool register_blocks)
    : store_(std::move(store)),
      pool_(pool),
      tokens_(std::move(prompt)),
      prompt_(tokens_.size()),
      target_(tokens_.size()),
      max_output_(max_output_tokens),
      register_blocks_(register_blocks) {
  if (prompt_ == 0) throw Error(ErrorKind::InvalidArgument, "the prompt must hold at least one token");
  if (tokens_.block_size() != store_->block_size()) {
    throw Error(ErrorKind::InvalidArgument, "the prompt is cut into blocks of ", tokens_.block_size(),
                " tokens, the manager's hold ", store_->block_size());
  }
  if (max_output_ > TokenBlocks::kMaxTokens) {
    throw Error(ErrorKind::InvalidArgument, "max_output_tokens must be at most ", TokenBlocks::kMaxTokens, ", got ",
                max_output_);
  }
}

void RequestKv::require(State state, const char* call) const {
  if (state_ == state) return;
  throw Error(ErrorKind::WrongState, call, " needs a request that is ", name_of(state), "; this one is ",
              name_of(state_));
}

// ── Schedule ──

std::size_t RequestKv::match_prefix() {
  require(State::Idle, "match_prefix");
  if (!slots_.empty() || computed_ != 0) {
    throw Error(ErrorKind::WrongState, "match_prefix comes before anything is computed; ", computed_,
                " tokens are already there");
  }
  if (!register_blocks_) return 0;
  // A full hit would leave no token to compute, and no logits to sample from.
  const std::size_t limit = (target_ - 1) / tokens_.block_size();
  slots_.resize(limit);
  const std::size_t hits = store_->match_prefix(pool_, tokens_.blocks().first(limit), slots_.data());
  slots_.resize(hits);
  registered_ = hits;
  computed_ = cached_ = hits * tokens_.block_size();
  return cached_;
}

void RequestKv::begin(State state, std::size_t tokens) {
  UNDERSTUDY_ASSERT(state_ == State::Idle && scheduled_ == 0 && allocated_ == 0, "schedules a step over another");
  const std::size_t held = slots_.size();
  const std::size_t needed = ceil_div(computed_ + tokens, tokens_.block_size());
  allocated_ = needed > held ? needed - held : 0;
  slots_.resize(held + allocated_);
  try {
    store_->allocate(pool_, std::span<SlotId>(slots_).last(allocated_));
  } catch (...) {
    slots_.resize(held);
    allocated_ = 0;
    throw;
  }
  allocated_ += std::exchange(ahead_, 0);  // they were allocated for this step
  scheduled_ = tokens;
  state_ = state;
}

void RequestKv::schedule_prefill(std::size_t tokens) {
  require(State::Idle, "schedule_prefill");
  if (computed_ >= target_) {
    throw Error(ErrorKind::WrongState, "prefill is complete: all ", target_, " tokens are computed; schedule a decode");
  }
  if (tokens == 0 || tokens > target_ - computed_) {
    throw Error(ErrorKind::InvalidArgument, "schedule_prefill takes 1 to ", target_ - computed_,
                " tokens, what is left of the prompt; got ", tokens);
  }
  begin(State::PrefillScheduled, tokens);
}

void RequestKv::require_decode_ready(const char* call) const {
  require(State::Idle, call);
  if (computed_ < target_) {
    throw Error(ErrorKind::WrongState, call, " before prefill is complete: ", computed_, " of ", target_,
                " tokens are computed");
  }
  if (generated_tokens() >= max_output_) {
    throw Error(ErrorKind::WrongState, call, " after the output budget of ", max_output_, " tokens is used up");
  }
}

void RequestKv::schedule_decode() {
  require_decode_ready("schedule_decode");
  begin(State::DecodeScheduled, 1);
}

std::size_t RequestKv::schedule_speculative(std::size_t tokens) {
  require_decode_ready("schedule_speculative");
  if (tokens == 0) throw Error(ErrorKind::InvalidArgument, "schedule_speculative takes at least 1 token");
  begin(State::SpeculativeScheduled,
        static_cast<std::size_t>(std::min<std::uint64_t>(tokens, max_output_ - generated_tokens())));
  return scheduled_;
}

bool RequestKv::schedule_ahead() {
  require(State::DecodeScheduled, "schedule_ahead");
  if (generated_tokens() + 1 >= max_output_) return false;
  const std::size_t held = slots_.size();
  const std::size_t needed = ceil_div(computed_ + scheduled_ + 1, tokens_.block_size());
  if (needed == held) return true;
  slots_.resize(needed);
  try {
    store_->allocate(pool_, std::span<SlotId>(slots_).last(needed - held));
  } catch (...) {
    slots_.resize(held);
    throw;
  }
  ahead_ = needed - held;
  return true;
}

void RequestKv::revert() {
  if (state_ == State::Idle || state_ == State::Closed) {
    throw Error(ErrorKind::WrongState, "revert needs a scheduled step; this request is ", name_of(state_));
  }
  const std::size_t taken = allocated_ + ahead_;
  store_->release(pool_, std::span<const SlotId>(slots_).last(taken), true);
  slots_.resize(slots_.size() - taken);
  scheduled_ = allocated_ = ahead_ = 0;
  state_ = State::Idle;
}

std::size_t RequestKv::view_length() const {
  if (state_ == State::Idle || state_ == State::Closed) {
    throw Error(ErrorKind::WrongState, "a view needs a scheduled step; this request is ", name_of(state_));
  }
  return computed_ + scheduled_;
}

// ── Apply ──

RequestKv::Outcome RequestKv::apply_prefill(std::optional<Token> token) {
  require(State::PrefillScheduled, "apply_prefill");
  const bool last = computed_ + scheduled_ == target_;
  const bool samples = last && generated_tokens() < max_output_;
  if (token && !samples) {
    throw Error(ErrorKind::InvalidArgument, last ? "the output budget is used up, so the last chunk samples no token"
                                                 : "only the last chunk of a prefill samples a token");
  }
  if (!token && samples) {
    throw Error(ErrorKind::InvalidArgument, "the last chunk of a prefill needs the token that it sampled");
  }
  return computed(scheduled_, token ? std::span<const Token>(&*token, 1) : std::span<const Token>{});
}

RequestKv::Outcome RequestKv::apply_decode(Token token) {
  require(State::DecodeScheduled, "apply_decode");
  return computed(1, {&token, 1});
}

RequestKv::Outcome RequestKv::apply_speculative(std::span<const Token> accepted) {
  require(State::SpeculativeScheduled, "apply_speculative");
  if (accepted.size() > scheduled_) {
    throw Error(ErrorKind::InvalidArgument, "apply_speculative takes at most the ", scheduled_,
                " tokens that were scheduled, got ", accepted.size());
  }
  return computed(accepted.size(), accepted);
}

// Records `tokens` new rows and the tokens sampled after them.
RequestKv::Outcome RequestKv::computed(std::size_t tokens, std::span<const Token> sampled) {
  tokens_.extend(sampled);
  UNDERSTUDY_ASSERT(tokens <= scheduled_ && computed_ + tokens <= slots_.size() * tokens_.block_size(),
                    "computes more rows than the step scheduled");
  computed_ += tokens;
  const Outcome outcome{register_computed(), finished()};

  // Frees the blocks of rejected drafts: the next step allocates what it writes.
  const std::size_t kept = std::max<std::size_t>(registered_, ceil_div(computed_, tokens_.block_size())) + ahead_;
  if (kept < slots_.size()) {
    store_->release(pool_, std::span<const SlotId>(slots_).subspan(kept), true);
    slots_.resize(kept);
  }
  scheduled_ = allocated_ = 0;
  state_ = State::Idle;
  UNDERSTUDY_ASSERT(registered_ <= slots_.size(), "registers more blocks than it holds");
  return outcome;
}

std::size_t RequestKv::register_computed() {
  if (!register_blocks_) return 0;
  const std::size_t full = computed_ / tokens_.block_size();
  if (full <= registered_) return 0;
  const std::size_t count = full - registered_;
  const std::size_t size = tokens_.block_size();
  const std::span<const Token> ids =
      store_->emits_token_ids() ? tokens_.tokens().subspan(registered_ * size, count * size) : std::span<const Token>{};
  // Under `reject` the id of another copy may be returned: slots_ follows it.
  store_->commit(pool_, std::span<SlotId>(slots_).subspan(registered_, count),
                 tokens_.blocks().subspan(registered_, count), ids);
  registered_ = full;
  return count;
}

// ── Release ──

void RequestKv::preempt() {
  require(State::Idle, "preempt");
  store_->release(pool_, slots_, true);
  slots_.clear();
  computed_ = cached_ = registered_ = ahead_ = 0;
  // The last token of the output budget is never fed back: computing it would take more than lifetime_blocks.
  const bool spent = generated_tokens() > 0 && generated_tokens() >= max_output_;
  target_ = tokens_.size() - (spent ? 1 : 0);
}

void RequestKv::close() noexcept {
  if (state_ == State::Closed) return;
  state_ = State::Closed;
  // Cannot fail: the request has exactly one reference to each.
  store_->release(pool_, slots_, true);
  slots_.clear();
  registered_ = scheduled_ = allocated_ = ahead_ = 0;
  store_.reset();
}

}  // namespace understudy
