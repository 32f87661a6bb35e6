// A request inside the simulated SGLang scheduler, and a batch of them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/request_id.hpp"
#include "engine/sglang/radix_tree.hpp"
#include "tokens/token_list.hpp"

namespace understudy {

struct SglangRequest {
  RequestId id = 0;
  TokenList tokens;  // prompt and outputs so far
  std::uint32_t prompt_tokens = 0;
  std::uint32_t max_new = 0;
  TokenList given_outputs;         // the first outputs, where they are known
  std::uint64_t first_output = 0;  // output p is the token first_output + p
  std::uint32_t eos_at = 0;        // number (from 1) of the output that is EOS; 0: none
  std::int64_t priority = 0;

  std::uint32_t prefix = 0;    // leading tokens with KV when the next prefill starts
  std::uint32_t end = 0;       // where this prefill stops
  std::uint32_t kv = 0;        // tokens with KV
  std::uint32_t own = 0;       // leading tokens that the tree owns
  std::uint32_t inserted = 0;  // how far it has inserted since its admission
  RadixLock lock;              // of what it uses of the tree
  std::uint32_t loaded = 0;    // part of the prefix that its admission loaded from the host
  std::uint32_t chunks = 0;    // unfinished pieces whose results are outstanding
  bool has_slot = false;
  bool is_outstanding = false;  // overlap: an output of the outstanding batch is its own
  // On one side of a disaggregated server.
  bool has_buffer = false;
  bool is_ready = false;       // decode: its transfer may begin
  bool was_joined = false;     // decode: its first output is out
  std::uint32_t sent = 0;      // prefill: leading tokens that are sent, or are on the decode side already
  std::uint32_t computed = 0;  // prefill, overlap: where the piece ends whose result is outstanding

  // With sliding windows or states.
  std::uint32_t window_begin = 0;  // its window KV before this is given back
  std::uint32_t branch = 0;        // where the tree should have a window or a state; 0: nowhere
  bool has_state = false;
  std::uint8_t tracking_slots = 0;
  std::uint32_t tracked = 0;         // tokens of the last tracked state; 0: none
  std::uint32_t tracked_before = 0;  // of the one before
  std::uint32_t untracked_kv = 0;    // its tokens in the last mixed step that tracked no state
  bool caches_end = true;            // its tokens are inserted when it ends

  bool leaves_queue = false;  // part of the batch that is being formed
  bool to_abort = false;      // ends as aborted at its next output
  bool finished = false;
  bool withdrawn = false;  // retracted or preempted, and not admitted again since
  bool was_admitted = false;
  std::uint64_t entered = 0;         // when it was last appended to the queue
  std::uint32_t matched_tokens = 0;  // its tokens and device prefix when it was last matched
  std::uint32_t matched_prefix = 0;

  std::uint32_t size() const noexcept { return tokens.size(); }
  std::uint32_t outputs() const noexcept { return tokens.size() - prompt_tokens; }
  std::uint32_t decodes() const noexcept { return kv - end; }  // since its prefill
  bool prefill_only() const noexcept { return max_new == 0; }
};

enum class SglangMode : std::uint8_t { Extend, Decode, Mixed };

struct SglangBatch {
  struct Row {
    SglangRequest* request = nullptr;
    std::uint32_t tokens = 0;
    bool decodes = false;
    std::uint32_t kv = 0;  // decodes: tokens with KV behind it
  };
  SglangMode mode = SglangMode::Extend;
  std::vector<Row> rows;
  SglangRequest* unfinished = nullptr;  // whose prefill this batch leaves unfinished
};

}  // namespace understudy
