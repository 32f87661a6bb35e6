// The load of a step, as input of timing models.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace understudy {

// Tokens of one request that a step computes, behind `history` tokens that have their KV.
struct PrefillChunk {
  std::uint32_t tokens = 0;
  std::uint32_t history = 0;
};

// A step in which every request computes one token.
struct DecodeLoad {
  std::uint64_t requests = 0;
  std::uint64_t context_tokens = 0;    // sum of their lengths, that token included
  std::uint64_t windowed_context = 0;  // the same with no length counted past the model's window
  std::uint64_t longest_context = 0;   // longest of them, if the model needs it
};

// A step as Dynamo's mocker counts it: prompts, and the requests that sample.
struct MockerLoad {
  std::uint64_t prefill_requests = 0;       // requests that compute prompt tokens
  std::uint64_t prefill_input_tokens = 0;   // sum of their prompt lengths so far, this chunk included
  std::uint64_t prefill_cached_tokens = 0;  // part computed before this step or taken from the cache
  std::uint64_t decode_requests = 0;        // requests that sample a token
  std::uint64_t decode_context_tokens = 0;  // sum of their lengths
};

// A whole step. A request decodes when its prompt was computed before and it computes one token, not counting drafts;
// otherwise its tokens are a chunk.
struct StepLoad {
  MockerLoad mocker;
  std::uint64_t tokens = 0;            // computed by all
  std::uint64_t requests = 0;          // sequences of the batch
  std::uint64_t decodes = 0;           // requests that decode
  std::uint64_t drafts = 0;            // draft tokens among `tokens`, which the step verifies
  std::uint64_t draft_pairs = 0;       // drafts of decoding requests with a token that each attends to
  std::uint64_t window_pairs = 0;      // the same with no length counted past the model's window
  std::uint64_t context_tokens = 0;    // exact sum of their lengths
  std::uint64_t windowed_context = 0;  // the same with no length counted past the model's window
  std::uint64_t longest_context = 0;
  std::uint64_t rank_tokens = 0;  // tokens of all data-parallel ranks that step together; 0: unknown
  std::uint64_t rank_width = 0;   // tokens to which the ranks are padded; 0: they are not
  std::vector<PrefillChunk> chunks;

  static StepLoad of(const DecodeLoad& decodes) {
    StepLoad load;
    load.mocker.decode_requests = load.tokens = load.requests = load.decodes = decodes.requests;
    load.mocker.decode_context_tokens = load.context_tokens = decodes.context_tokens;
    load.windowed_context = decodes.windowed_context;
    load.longest_context = decodes.longest_context;
    return load;
  }
  // One prompt of which `history` tokens are there, and nothing else.
  static StepLoad of_prompt(std::uint32_t prompt_tokens, std::uint32_t history) {
    StepLoad load;
    load.mocker = {1, prompt_tokens, history, 0, 0};
    load.tokens = prompt_tokens - history;
    load.requests = 1;
    load.chunks.push_back({prompt_tokens - history, history});
    return load;
  }

  void clear() noexcept {  // keeps the memory
    std::vector<PrefillChunk> kept = std::move(chunks);
    kept.clear();
    *this = {};
    chunks = std::move(kept);
  }
  void add_decode(std::uint64_t context, std::uint64_t window, std::uint64_t num_drafts = 0) noexcept {
    ++decodes;
    context_tokens += context;
    windowed_context += std::min(context, window);
    longest_context = std::max(longest_context, context);
    draft_pairs += num_drafts * context;
    window_pairs += num_drafts * std::min(context, window);
  }
  bool only_decodes() const noexcept { return chunks.empty() && tokens == decodes; }
  DecodeLoad as_decodes() const noexcept { return {decodes, context_tokens, windowed_context, longest_context}; }
};

}  // namespace understudy
