// Sizes of TensorRT-LLM's pools, from quotas in bytes or tokens.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/errors.hpp"
#include "engine/trtllm/config.hpp"

namespace understudy {

namespace {

constexpr std::uint64_t kGrain = 2u << 20;
constexpr std::uint64_t kHostGrain = 4096;

std::uint64_t up_to(std::uint64_t value, std::uint64_t unit) { return (value + unit - 1) / unit * unit; }

// Python's round: half to even.
std::uint64_t round_half_even(double value) { return static_cast<std::uint64_t>(std::nearbyint(value)); }

std::uint64_t device_grain(std::uint64_t quota) {
  const double doublings = std::log2(static_cast<double>(quota) / (static_cast<double>(kGrain) * 512));
  return kGrain << static_cast<unsigned>(std::clamp(static_cast<int>(doublings), 0, 4));
}

// A request of a batch that pools are sized for.
struct Planned {
  std::uint32_t capacity;
  std::uint32_t history;
};

class MemoryPlan {
 public:
  explicit MemoryPlan(const TrtSettings& settings) : settings_(settings) {}

  TrtMemory make() {
    group_layers();
    plan_quotas();
    plan_minimum();
    const std::vector<double> ratio = choose_ratio();
    for (std::size_t level = 0; level < out_.quotas.size(); ++level) {
      out_.layout.levels.push_back(count_slots(out_.quotas[level], grain_of(level), ratio));
    }
    limit_sequences();
    return std::move(out_);
  }

 private:
  std::size_t num_groups() const { return out_.layout.page_bytes.size(); }
  std::uint64_t grain_of(std::size_t level) const {
    if (level == 0) return device_grain(out_.quotas[0]);
    return level == 1 && out_.layout.has_host ? kHostGrain : kGrain;
  }
  std::uint32_t window_of(std::uint32_t layer) const {
    if (settings_.max_attention_window.empty()) return 0;
    const std::uint32_t window = settings_.max_attention_window[layer % settings_.max_attention_window.size()];
    return window >= settings_.max_seq_len ? 0 : window;
  }

  void group_layers() {
    TrtLayout& layout = out_.layout;
    layout.tokens_per_block = settings_.tokens_per_block;
    out_.block_bytes = settings_.num_layers * settings_.layer_bytes_per_token * settings_.tokens_per_block;
    for (std::uint32_t layer = 0; layer < settings_.num_layers; ++layer) {
      const std::uint32_t window = window_of(layer);
      const auto found = std::ranges::find(layout.life_cycles, window, &TrtLifeCycle::window);
      if (found != layout.life_cycles.end()) {
        ++found->layers;
        continue;
      }
      layout.life_cycles.push_back({window, 0, 1, window == 0 ? settings_.max_seq_len : window});
    }
    if (layout.life_cycles.size() > TrtNode::kMostLifeCycles) {
      throw Error(ErrorKind::ConfigError, "max_attention_window: ", layout.life_cycles.size(),
                  " different windows; at most ", TrtNode::kMostLifeCycles, " are modelled");
    }
    for (TrtLifeCycle& one : layout.life_cycles) {
      const std::uint64_t bytes = one.layers * settings_.layer_bytes_per_token * settings_.tokens_per_block;
      const auto found = std::ranges::find(layout.page_bytes, bytes);
      one.group = static_cast<std::uint32_t>(found - layout.page_bytes.begin());
      if (found == layout.page_bytes.end()) layout.page_bytes.push_back(bytes);
    }
  }

  // Bytes that `tokens` need, the prompts of one pass among them.
  std::uint64_t bytes_of(std::uint64_t tokens) const {
    const std::uint64_t prompt = std::min<std::uint64_t>(tokens, settings_.max_num_tokens);
    std::uint64_t bytes = 0;
    for (const TrtLifeCycle& one : out_.layout.life_cycles) {
      const std::uint64_t layer = settings_.layer_bytes_per_token;
      if (one.window == 0) {
        bytes += tokens * one.layers * layer;
        continue;
      }
      const std::uint64_t window = up_to(one.window, settings_.tokens_per_block);
      bytes += settings_.max_batch_size * window * one.layers * layer;
      // With scratch, one layer of a window at a time has a whole prompt.
      bytes += settings_.enable_swa_scratch_reuse ? prompt * layer + (one.layers - 1) * window * layer
                                                  : prompt * one.layers * layer;
    }
    return bytes;
  }

  void plan_quotas() {
    std::optional<std::uint64_t> device = settings_.max_gpu_total_bytes;
    if (settings_.max_tokens) {
      const double bytes = static_cast<double>(bytes_of(*settings_.max_tokens)) / settings_.max_util_for_resume;
      const auto quota = static_cast<std::uint64_t>(std::ceil(bytes));
      device = std::min(device.value_or(quota), quota);
    }
    if (!device || *device == 0) {
      throw Error(ErrorKind::ConfigError,
                  "max_tokens: no size of the KV cache; give max_tokens or max_gpu_total_bytes");
    }
    out_.quotas.push_back(*device);
    const std::uint64_t host = settings_.host_cache_size.value_or(*device);
    out_.layout.has_host = host > 0;
    if (host > 0) out_.quotas.push_back(host);
    if (settings_.disk_cache_size > 0) out_.quotas.push_back(settings_.disk_cache_size);
  }

  // ── Several groups of pools ──

  // Blocks that a window needs while it slides; full attention has the most of any.
  std::uint32_t least_blocks(std::uint32_t window) const {
    const std::uint32_t block = settings_.tokens_per_block;
    return (window + block - 2) / block + 1;
  }

  std::vector<std::uint64_t> slots_for(const std::vector<Planned>& batch) const {
    const std::uint32_t block = settings_.tokens_per_block;
    std::vector<std::uint64_t> slots(num_groups(), 0);
    for (const TrtLifeCycle& one : out_.layout.life_cycles) {
      for (const Planned& request : batch) {
        const std::uint64_t blocks = up_to(request.capacity, block) / block;
        const std::uint64_t stale = one.stale_end(request.history, block);
        std::uint64_t needed = blocks > stale ? blocks - stale : 0;
        if (settings_.enable_swa_scratch_reuse && one.window > 0) {
          const std::uint64_t first = up_to(request.history, block) / block;
          const std::uint64_t end = std::min<std::uint64_t>(one.stale_end(request.capacity, block), blocks);
          const std::uint64_t scratch = end > first ? end - first : 0;
          needed = needed - std::min(needed, scratch) + up_to(scratch, one.layers) / one.layers;
        }
        slots[one.group] += needed;
      }
    }
    return slots;
  }

  void plan_minimum() {
    least_.assign(num_groups(), 0);
    std::uint32_t most = 1;
    for (const TrtLifeCycle& one : out_.layout.life_cycles) {
      if (one.window > 0) most = std::max(most, least_blocks(one.window));
    }
    for (const TrtLifeCycle& one : out_.layout.life_cycles) {
      least_[one.group] += one.window > 0 ? least_blocks(one.window) : most;
    }
    if (!settings_.avg_seq_len || !settings_.pool_ratio.empty()) return;
    std::vector<Planned> longest(settings_.max_batch_size, {1, 0});
    longest[0] = {settings_.max_seq_len, settings_.max_seq_len - 1};
    for (const auto& batch : {longest, std::vector<Planned>{{settings_.max_num_tokens, 0}}}) {
      const std::vector<std::uint64_t> slots = slots_for(batch);
      for (std::size_t i = 0; i < slots.size(); ++i) {
        const double scaled = std::ceil(static_cast<double>(slots[i]) / settings_.max_util_for_resume);
        least_[i] = std::max(least_[i], static_cast<std::uint64_t>(scaled));
      }
    }
  }

  std::vector<double> choose_ratio() const {
    if (!settings_.pool_ratio.empty()) {
      const double sum = std::accumulate(settings_.pool_ratio.begin(), settings_.pool_ratio.end(), 0.0);
      const bool positive = std::ranges::all_of(settings_.pool_ratio, [](double share) { return share > 0; });
      if (settings_.pool_ratio.size() != num_groups() || !positive || std::abs(sum - 1) > 1e-6) {
        throw Error(ErrorKind::ConfigError, "pool_ratio: ", settings_.pool_ratio.size(), " shares for ", num_groups(),
                    " groups of pools; give one above 0 for each, 1 in all");
      }
      return settings_.pool_ratio;
    }
    std::vector<Planned> batch{{2049, 2048}};
    if (settings_.avg_seq_len) {
      if (*settings_.avg_seq_len > settings_.max_seq_len) {
        throw Error(ErrorKind::ConfigError, "avg_seq_len: ", *settings_.avg_seq_len, " exceeds max_seq_len (",
                    settings_.max_seq_len, "); lower it");
      }
      batch.assign(settings_.max_batch_size, {*settings_.avg_seq_len, std::max(*settings_.avg_seq_len, 1u) - 1});
      batch[0] = {settings_.max_num_tokens, 0};
    }
    const std::vector<std::uint64_t> slots = slots_for(batch);
    std::vector<double> bytes(num_groups());
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<double>(up_to(slots[i] * out_.layout.page_bytes[i], grain_of(0)));
    }
    const double total = std::accumulate(bytes.begin(), bytes.end(), 0.0);
    for (double& share : bytes) share /= total;
    return bytes;
  }

  std::uint64_t grains_for(std::uint64_t slots, std::size_t group, std::uint64_t grain) const {
    return up_to(slots * out_.layout.page_bytes[group], grain) / grain;
  }

  // Slots of each group: by share, smallest first; a group below its minimum gets that, and the others the rest.
  std::vector<std::uint32_t> count_slots(std::uint64_t quota, std::uint64_t grain,
                                         const std::vector<double>& ratio) const {
    std::uint64_t minimum = 0;
    for (std::size_t i = 0; i < num_groups(); ++i) minimum += grains_for(least_[i], i, grain);
    std::int64_t rest = static_cast<std::int64_t>(std::max(minimum, up_to(quota, grain) / grain));
    std::vector<std::uint32_t> out(num_groups(), 0);
    std::vector<std::size_t> open(num_groups());
    std::iota(open.begin(), open.end(), 0);
    const auto slots_in = [&](std::uint64_t grains, std::size_t group) {
      return static_cast<std::uint32_t>(grains * grain / out_.layout.page_bytes[group]);
    };
    while (!open.empty()) {
      std::vector<std::size_t> order = open;
      std::ranges::stable_sort(order, {}, [&](std::size_t group) { return ratio[group]; });
      std::int64_t budget = rest;
      for (std::size_t i = 0; i < order.size(); ++i) {
        double sum = 0;
        for (std::size_t j = i; j < order.size(); ++j) sum += ratio[order[j]];
        const double share = static_cast<double>(budget) * (ratio[order[i]] / sum);
        out[order[i]] = slots_in(round_half_even(share), order[i]);
        budget -= static_cast<std::int64_t>(grains_for(out[order[i]], order[i], grain));
      }
      std::vector<std::size_t> above;
      for (const std::size_t group : open) {
        if (out[group] > least_[group]) {
          above.push_back(group);
          continue;
        }
        const std::uint64_t grains = grains_for(least_[group], group, grain);
        out[group] = slots_in(grains, group);
        rest -= static_cast<std::int64_t>(grains);
      }
      if (above.size() == open.size() || above.empty()) break;
      if (rest <= 0) throw Error(ErrorKind::ConfigError, "max_tokens: too few for the pools of all windows; raise it");
      open = above;
    }
    return out;
  }

  // The longest sequence that fits on the device alone.
  void limit_sequences() {
    const std::uint32_t block = settings_.tokens_per_block;
    const auto fits = [&](std::uint32_t blocks) {
      std::vector<std::uint64_t> slots(num_groups(), 0);
      for (const TrtLifeCycle& one : out_.layout.life_cycles) {
        slots[one.group] += blocks - std::min(blocks, one.stale_end(blocks * block, block));
      }
      for (std::size_t i = 0; i < slots.size(); ++i) {
        if (slots[i] > out_.layout.levels[0][i]) return false;
      }
      return true;
    };
    if (!fits(1)) throw Error(ErrorKind::ConfigError, "max_tokens: the pools cannot hold one block; raise it");
    std::uint64_t most = settings_.max_seq_len;
    std::uint32_t below = 1;
    std::uint32_t above = (settings_.max_seq_len + block - 1) / block;
    if (!fits(above)) {
      while (below + 1 < above) {
        const std::uint32_t middle = (below + above) / 2;
        (fits(middle) ? below : above) = middle;
      }
      most = std::uint64_t{below} * block;
    }
    if (settings_.max_tokens) most = std::min(most, *settings_.max_tokens);
    out_.max_seq_len = static_cast<std::uint32_t>(most);
  }

  const TrtSettings& settings_;
  TrtMemory out_;
  std::vector<std::uint64_t> least_;  // slots by group
};

}  // namespace

std::uint32_t TrtSettings::chunk_unit() const {
  const bool slides = !max_attention_window.empty() && max_seq_len > std::ranges::min(max_attention_window);
  return slides ? std::max(256u, tokens_per_block) : tokens_per_block;
}

std::vector<std::uint64_t> TrtMemory::announced_blocks() const {
  std::vector<std::uint64_t> out;
  for (const std::uint64_t quota : quotas) out.push_back(quota / block_bytes);
  return out;
}

TrtMemory plan_trt_memory(const TrtSettings& settings) { return MemoryPlan(settings).make(); }

}  // namespace understudy
