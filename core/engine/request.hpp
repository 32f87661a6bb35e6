// A request as submitted to a simulated engine, and its record. It has lengths and identities, never tokens.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/request_id.hpp"
#include "tokens/identities.hpp"
#include "tokens/token_list.hpp"

namespace understudy {

// Source of the identities of a request's blocks, computed when they are first needed.
class IdentitySource {
 public:
  virtual ~IdentitySource() = default;
  // Append identities until `out` holds `count` blocks, or more that are already computed.
  virtual void extend(std::vector<BlockIdentity>& out, std::size_t count) const = 0;
  // The same as numbers that are equal where a block and all before it are: their sequence hashes, or (`hashes` false)
  // others that take less time. A list has names of one sort. Sources that hash override it.
  virtual void extend_names(std::vector<std::uint64_t>& out, std::size_t count, bool hashes) const;
  // Append the tokens [from, to), as runs whose values are equal where the tokens are. Tokens behind the last full
  // block are the request's own. Sources of many tokens override it.
  virtual void append_tokens(TokenList& out, std::uint32_t from, std::uint32_t to, std::uint32_t block_size,
                             RequestId request) const;
  // Most blocks that it can name.
  virtual std::size_t size() const noexcept { return std::numeric_limits<std::size_t>::max(); }
  // The first `count` blocks, for readers before the request is served: in `room`, or kept here until an empty `out`
  // receives them.
  virtual std::span<const BlockIdentity> first(std::size_t count, std::vector<BlockIdentity>& room) const {
    room.clear();
    extend(room, count);
    return room;
  }
  // Offers blocks that `extend` has made, for the next engine that serves the same request.
  virtual void offer(std::vector<BlockIdentity>&) const {}
};

// Identities that are known beforehand, prompt and output.
class GivenIdentities final : public IdentitySource {
 public:
  explicit GivenIdentities(Identities blocks) : blocks_(std::move(blocks)) {}
  std::size_t size() const noexcept override { return blocks_.size(); }
  void extend(std::vector<BlockIdentity>& out, std::size_t count) const override {
    require(count);
    const auto more = blocks_.span().subspan(out.size(), count - out.size());
    out.insert(out.end(), more.begin(), more.end());
  }
  void extend_names(std::vector<std::uint64_t>& out, std::size_t count, bool hashes) const override;

 private:
  void require(std::size_t count) const {
    if (count <= blocks_.size()) return;
    throw Error(ErrorKind::InvalidArgument, "identities name ", blocks_.size(), " blocks; block ", count - 1,
                " of the request is needed");
  }

  Identities blocks_;
};

// Where a request's prompt is computed, if not where its output is.
enum class KvLeg : std::uint8_t {
  Whole,
  Prefill,  // here; a peer reads its blocks and decodes
  Decode,   // by a peer, which has its blocks
};

// Fields that no step reads come first, so that the others are next to the hot fields of a request.
struct RequestSpec {
  RequestId id = 0;                                  // chosen by the driver, never used twice in one engine
  std::string name;                                  // breaks ties under the priority policy
  std::shared_ptr<const IdentitySource> identities;  // null: nothing of it is ever found again
  // With speculation: accepted drafts of the step whose first output has number p (from 0), at p modulo the length;
  // null: by rates.
  std::shared_ptr<const std::vector<std::uint32_t>> accepts;
  std::int64_t priority = 0;
  bool has_priority = true;  // false: the caller gave none; SGLang then schedules it last, vLLM as 0
  double arrival_time = 0;
  std::uint32_t adapter = 0;   // LoRA adapter; 0: the model itself
  std::uint32_t rank = 0;      // rank in an engine with several
  std::uint32_t peer = 0;      // worker with the prompt's blocks, for KvLeg::Decode
  RequestId peer_request = 0;  // id of the request there
  KvLeg leg = KvLeg::Whole;
  std::uint32_t prompt_tokens = 0;
  std::uint32_t max_tokens = 0;
  std::uint32_t eos_at = 0;  // number (from 1) of the output token that is EOS; 0: only a limit ends it

  // Output tokens at the end, unless max_model_len cuts them. The scheduler knows only `max_tokens`.
  std::uint32_t outputs() const noexcept { return eos_at > 0 && eos_at < max_tokens ? eos_at : max_tokens; }
};

enum class FinishReason : std::uint8_t {
  Length,     // reached max_tokens or the model's length limit
  Stop,       // reached EOS before that
  Cancelled,  // by Engine::cancel, or by the engine itself (a queue limit)
  Failed,     // could not be computed
};

// Record of a finished request. Times are -1 for events that never happened.
struct RequestRecord {
  RequestId id = 0;
  std::string name;
  FinishReason reason = FinishReason::Length;
  std::uint32_t output_tokens = 0;
  std::int64_t queued_ns = -1;  // when the engine read it: at a boundary between steps
  std::int64_t first_admit_ns = -1;
  std::int64_t first_token_ns = -1;
  std::int64_t second_token_ns = -1;
  std::int64_t last_token_ns = -1;
  std::int64_t finish_ns = -1;
  std::uint32_t preemptions = 0;
  std::uint32_t cached_first = 0;  // tokens found at its first admission
  std::uint64_t cached_total = 0;  // at all admissions together
  std::uint64_t looked_up = 0;     // tokens looked up, summed over admissions

  // Tiers.
  std::array<std::uint32_t, 3> below_first{};  // part of cached_first from G2, G3, G4
  std::array<std::uint64_t, 3> below_total{};  // part of cached_total
  std::int64_t parked_ns = 0;                  // while its blocks were loaded
  std::int64_t room_wait_ns = 0;               // while copies left the device
  std::uint32_t pulled_tokens = 0;             // read from a prefill worker, part of cached_first
};

}  // namespace understudy
