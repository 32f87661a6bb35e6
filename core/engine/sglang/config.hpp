// Settings of a simulated SGLang scheduler, with SGLang's names.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>

#include "engine/sglang/disaggregation.hpp"
#include "engine/sglang/host_cache.hpp"
#include "engine/sglang/radix_tree.hpp"

namespace understudy {

enum class SglangPolicy : std::uint8_t { Fcfs, Lpm, DfsWeight, Lof };

struct SglangSettings {
  std::uint32_t page_size = 1;
  std::uint64_t max_total_num_tokens = 16384;
  std::uint32_t max_running_requests = 128;
  std::int64_t max_prefill_tokens = 16384;
  std::int64_t chunked_prefill_size = 8192;  // -1: off
  std::optional<std::uint32_t> prefill_max_requests;
  SglangPolicy schedule_policy = SglangPolicy::Fcfs;
  double schedule_conservativeness = 1.0;
  double init_new_token_ratio = 0.7;
  double min_new_token_ratio_factor = 0.14;
  std::uint32_t new_token_ratio_decay_steps = 600;
  std::uint32_t retract_decode_steps = 20;
  std::uint32_t clip_max_new_tokens = 4096;
  std::int64_t in_batch_check_threshold = 32;  // -1: off
  std::int64_t in_batch_deprioritize_threshold = 32;
  bool enable_mixed_chunk = false;
  bool disable_radix_cache = false;
  bool ignore_eos = false;
  bool overlap = true;
  RadixEviction radix_eviction_policy = RadixEviction::Lru;
  bool older_tree = false;
  std::uint32_t context_len = 131072;
  bool enable_priority_scheduling = false;
  std::int64_t priority_scheduling_preemption_threshold = 10;
  bool schedule_low_priority_values_first = false;
  bool disable_priority_preemption = false;
  bool retracts_by_priority = false;
  std::optional<std::uint32_t> max_queued_requests;
  std::uint32_t prefill_decode_interval = 0;
  std::uint32_t prefill_decode_interval_min_bs = 0;
  std::optional<HostSettings> host;  // below the device; nothing: none

  // Sliding-window layers: their pool, in tokens. At most one of windows and states, and neither with a host tier.
  std::optional<std::uint32_t> swa_window;
  std::uint64_t swa_tokens = 0;
  std::uint32_t swa_eviction_interval = 128;
  bool release_prefill_swa = false;
  // Recurrent layers: slots for their states.
  std::optional<std::uint64_t> mamba_slots;
  bool mamba_extra_buffer = false;  // tracks states while it computes; else copies them between computations
  bool mamba_lazy = false;          // of two tracking slots holds the second only while it is written
  std::uint32_t mamba_track_interval = 256;
  std::int64_t mamba_max_states_per_path = -1;  // -1: any number

  SglangSideSettings side;                 // of a disaggregated server
  std::uint32_t decode_log_interval = 40;  // decode results between two batches of published events

  // Tokens between states that a prefill can track, and between those that decoding tracks.
  std::uint32_t state_grid() const { return std::lcm(state_chunk(), page_size); }
  std::uint32_t state_chunk() const { return std::max(kStateChunk, page_size); }
  std::uint32_t track_grid() const { return std::lcm(state_grid(), mamba_track_interval); }
  // ConfigError for a combination that SGLang, or this scheduler, does not have.
  void check_components() const;
  static constexpr std::uint32_t kStateChunk = 64;  // tokens that a kernel of linear attention computes at once

  // Outputs after which SGLang ends a request for `asked`: pool and context must hold the prompt, and a page more.
  std::uint32_t most_outputs(std::int64_t prompt_tokens, std::uint32_t asked) const {
    const auto total = static_cast<std::int64_t>(max_total_num_tokens);
    const std::int64_t context = std::min<std::int64_t>(context_len, total) - 1;
    const std::int64_t pages = (prompt_tokens + page_size - 1) / page_size * page_size;
    const std::int64_t most =
        std::min({static_cast<std::int64_t>(asked), context - prompt_tokens - 1, total - pages - page_size - 1});
    return static_cast<std::uint32_t>(std::max<std::int64_t>(0, most));
  }
};

}  // namespace understudy
