// Settings of a simulated TensorRT-LLM engine (PyTorch backend, KV cache manager V2), with its names.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "engine/trtllm/layout.hpp"
#include "engine/trtllm/sequence.hpp"

namespace understudy {

enum class TrtReusePolicy : std::uint8_t { AllReusable, PerRequest, PerConversation };
enum class TrtWaiting : std::uint8_t { Fcfs, Priority };

struct TrtSettings {
  std::uint32_t max_batch_size = 2048;
  std::uint32_t max_num_tokens = 8192;
  std::uint32_t max_seq_len = 8192;
  std::uint32_t tokens_per_block = 32;
  bool enable_chunked_prefill = false;
  bool overlap = true;
  bool enable_prefix_aware_scheduling = true;
  bool enable_recompute_pause = true;
  bool enable_block_reuse = true;
  bool enable_partial_reuse = true;
  TrtReusePolicy reuse_policy = TrtReusePolicy::AllReusable;
  double max_util_for_resume = 0.95;
  bool enable_swa_scratch_reuse = false;
  std::uint32_t batch_wait_timeout_iters = 0;
  double batch_wait_max_tokens_ratio = 0;
  TrtWaiting waiting_queue_policy = TrtWaiting::Fcfs;

  // Memory.
  std::uint32_t num_layers = 1;
  std::uint64_t layer_bytes_per_token = 4096;       // of keys and values
  std::vector<std::uint32_t> max_attention_window;  // repeated over the layers; none: full attention
  std::optional<std::uint64_t> max_tokens;
  std::optional<std::uint64_t> max_gpu_total_bytes;
  std::optional<std::uint64_t> host_cache_size;  // bytes; nothing: as large as the device's
  std::uint64_t disk_cache_size = 0;
  std::optional<std::uint32_t> avg_seq_len;
  std::vector<double> pool_ratio;

  TrtReuse reuse() const {
    return {enable_block_reuse, enable_partial_reuse, enable_block_reuse && reuse_policy != TrtReusePolicy::AllReusable,
            max_util_for_resume, enable_swa_scratch_reuse};
  }
  // Tokens that a chunk of a prompt is a multiple of, unless it is the last.
  std::uint32_t chunk_unit() const;
};

// Sizes that follow from the settings.
struct TrtMemory {
  TrtLayout layout;
  std::vector<std::uint64_t> quotas;  // bytes by level, before they are rounded
  std::uint32_t max_seq_len = 0;      // that the device can hold
  std::uint64_t block_bytes = 0;      // of all layers

  // Blocks of each level as events announce them.
  std::vector<std::uint64_t> announced_blocks() const;
};

// ConfigError: settings that TensorRT-LLM refuses, or that leave no memory.
TrtMemory plan_trt_memory(const TrtSettings& settings);

}  // namespace understudy
