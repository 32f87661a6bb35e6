// A connector for docs/connectors.md: a remote cache that has the blocks of every prompt, and takes a while to send
// them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>

#include "engine/vllm/config.hpp"
#include "engine/vllm/connector/connector.hpp"

namespace understudy {

class SlowLoads final : public Connector {
 public:
  SlowLoads(std::uint32_t block_size, std::int64_t delay_ns) : block_size_(block_size), delay_ns_(delay_ns) {}

  bool loads() const noexcept override { return true; }
  bool polls() const noexcept override { return true; }

  // Whole blocks of the prompt behind the local ones. At least one token is left to compute.
  std::optional<std::uint32_t> get_num_new_matched_tokens(EngineRequest& request, std::uint32_t local,
                                                          std::int64_t /*now_ns*/) override {
    const std::uint32_t most = (request.spec.prompt_tokens - 1) / block_size_ * block_size_;
    return most > local ? most - local : 0;
  }
  // The request has blocks for the tokens that the lookup found: they come after the delay.
  void update_state_after_alloc(EngineRequest& request, std::uint32_t /*local*/, std::uint32_t external,
                                std::int64_t now_ns) override {
    if (external > 0) due_ns_[request.id] = now_ns + delay_ns_;
  }
  // The worker reports the loads that are done. One of a request that was aborted too: then its blocks are freed.
  void poll(ConnectorOutput& output, std::int64_t now_ns) override {
    std::erase_if(due_ns_, [&](const auto& load) {
      if (load.second > now_ns) return false;
      output.received.push_back(load.first);
      return true;
    });
  }
  // Until then the engine may sleep, or run ahead.
  std::int64_t next_event_ns() const override {
    std::int64_t next = kNever;
    for (const auto& [id, due_ns] : due_ns_) next = std::min(next, due_ns);
    return next;
  }
  bool has_pending_work() const override { return !due_ns_.empty(); }

 private:
  std::uint32_t block_size_;
  std::int64_t delay_ns_;
  std::map<RequestId, std::int64_t> due_ns_;
};

}  // namespace understudy
