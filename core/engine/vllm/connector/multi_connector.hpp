// vLLM's MultiConnector: several connectors of one instance.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/vllm/connector/connector.hpp"

namespace understudy {

struct MultiMetadata final : ConnectorMetadata {
  std::vector<std::unique_ptr<ConnectorMetadata>> children;  // null: none
};

// Log of a schedule, in the format of a recording.
struct MultiLog {
  struct Lookup {
    RequestId request = 0;
    std::uint32_t local = 0;
    std::optional<std::uint32_t> result;
    std::vector<std::optional<std::uint32_t>> answers;  // of each child that was asked
  };
  std::vector<Lookup> lookups;
  std::vector<std::pair<RequestId, std::vector<std::uint32_t>>> told;  // tokens that each child is to load
};

// Every call goes to all children, in order.
class MultiConnector final : public Connector {
 public:
  MultiConnector(std::vector<std::unique_ptr<Connector>> children, bool logs)
      : children_(std::move(children)), logs_(logs) {}

  MultiLog& log() noexcept { return log_; }

  bool loads() const noexcept override;
  bool produces() const noexcept override;
  bool consumes() const noexcept override;
  void on_new_request(const EngineRequest& request) override;
  std::optional<std::uint32_t> get_num_new_matched_tokens(EngineRequest& request, std::uint32_t local,
                                                          std::int64_t now_ns) override;
  void update_state_after_alloc(EngineRequest& request, std::uint32_t local, std::uint32_t external,
                                std::int64_t now_ns) override;
  HitSource get_external_cache_hit_source(RequestId id) const override {
    return children_[chosen_.at(id)]->get_external_cache_hit_source(id);
  }
  void handle_preemption(const EngineRequest& request) override;
  void on_scheduled(const ScheduledEntry& entry) override;
  std::unique_ptr<ConnectorMetadata> build_connector_meta(std::int64_t now_ns) override;
  bool request_finished(EngineRequest& request, bool aborted, std::int64_t now_ns) override;
  void update_connector_output(const ConnectorOutput& output) override;
  bool reset_cache() override;
  void poll(ConnectorOutput& output, std::int64_t now_ns) override;
  std::int64_t start_step(std::unique_ptr<ConnectorMetadata> meta, ConnectorOutput& output,
                          std::int64_t now_ns) override;
  bool polls() const noexcept override;
  std::int64_t next_event_ns() const override;
  bool sends_at(std::int64_t now_ns) const override;
  bool has_failed() const override;
  bool has_pending_work() const override;
  void check() const override;

 private:
  std::vector<std::unique_ptr<Connector>> children_;
  std::unordered_map<RequestId, std::size_t> chosen_;  // the child with tokens, at the last lookup that found any
  // Reports of a request as sent that are still to be swallowed: its blocks are free when all children have sent it.
  std::unordered_map<RequestId, std::size_t> extra_async_saves_;
  bool logs_;
  MultiLog log_;
};

}  // namespace understudy
