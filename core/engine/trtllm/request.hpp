// A request inside the simulated executor of TensorRT-LLM.
#pragma once

#include <cstdint>
#include <memory>

#include "base/request_id.hpp"
#include "engine/trtllm/sequence.hpp"
#include "tokens/token_list.hpp"

namespace understudy {

enum class TrtState : std::uint8_t { Context = 10, Generation = 13, ToComplete = 14, Complete = 20 };

struct TrtArrival {
  RequestId id = 0;
  TokenList prompt;
  TokenList outputs;               // the first ones, where they are known
  std::uint64_t first_output = 0;  // output p is the token first_output + p
  std::uint32_t max_new = 0;
  std::uint32_t eos_at = 0;  // number (from 1) of the output that is EOS; 0: none
  double priority = 0.5;
  TrtScope scope;
};

struct TrtRequest {
  RequestId id = 0;
  TokenList tokens;  // the prompt; after a pause with the outputs before it
  TokenList given_outputs;
  std::uint64_t first_output = 0;
  std::uint32_t prompt = 0;
  std::uint32_t max_new = 0;    // since the last pause
  std::uint32_t generated = 0;  // since the last pause
  std::uint32_t outputs = 0;
  std::uint32_t eos_at = 0;
  double priority = 0.5;
  TrtScope scope;

  TrtState state = TrtState::Context;
  std::uint32_t position = 0;
  std::uint32_t reused = 0;  // where its first chunk begins
  std::uint32_t chunk = 0;
  std::uint64_t cache_number = 0;  // caches in the order in which they were made
  bool cancelled = false;
  std::unique_ptr<TrtSequence> cache;

  std::uint32_t left() const noexcept { return prompt - position; }
  std::uint32_t length() const noexcept { return prompt + generated; }
  bool in_first_chunk() const noexcept { return position == reused; }
  bool has_started() const noexcept {
    return state == TrtState::Generation || state == TrtState::ToComplete ||
           (state == TrtState::Context && !in_first_chunk());
  }
  bool ends_with_next() const noexcept { return generated + 1 >= max_new; }
  bool has_active_cache() const noexcept { return cache != nullptr && cache->active(); }
};

}  // namespace understudy
