// vLLM's OffloadingConnector: prompts are stored on the host, and loaded from there.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/vllm/connector/connector.hpp"
#include "engine/vllm/offload_connector.hpp"
#include "engine/vllm/offload_links.hpp"
#include "engine/vllm/offload_steps.hpp"

namespace understudy {

struct HostMetadata final : ConnectorMetadata {
  explicit HostMetadata(OffloadOrders of) : orders(std::move(of)) {}
  OffloadOrders orders;
};

class OffloadingConnector final : public Connector {
 public:
  // `notes_pulls`: also blocks that another connector fills are handed out, so that stores from them are flushed.
  OffloadingConnector(std::unique_ptr<OffloadConnector> scheduler, bool grouped, bool notes_pulls)
      : scheduler_(std::move(scheduler)), grouped_(grouped), notes_pulls_(notes_pulls) {}
  // One of these moves its bytes; none: the driver of recorded steps does.
  void use_links(std::unique_ptr<OffloadLinks> links) { links_ = std::move(links); }
  void use_steps(std::unique_ptr<OffloadSteps> steps) { steps_ = std::move(steps); }

  OffloadConnector& scheduler() noexcept { return *scheduler_; }
  OffloadLinks* links() noexcept { return links_.get(); }  // null: other means
  OffloadSteps* steps() noexcept { return steps_.get(); }

  void on_new_request(const EngineRequest& request) override { scheduler_->came(request); }
  std::optional<std::uint32_t> get_num_new_matched_tokens(EngineRequest& request, std::uint32_t local,
                                                          std::int64_t now_ns) override {
    return scheduler_->look_up(request, local, now_ns);
  }
  bool loads() const noexcept override { return true; }
  bool can_load(const EngineRequest& request, std::uint32_t local, std::uint32_t tokens) override {
    return scheduler_->can_load(request, local, tokens);
  }
  void update_state_after_alloc(EngineRequest& request, std::uint32_t local, std::uint32_t external,
                                std::int64_t now_ns) override;
  void handle_preemption(const EngineRequest& request) override { scheduler_->preempted(request); }
  void on_scheduled(const ScheduledEntry& entry) override {
    scheduler_->scheduled(entry.request, entry.request.num_computed_tokens, entry.admitted, entry.resumed);
  }
  std::unique_ptr<ConnectorMetadata> build_connector_meta(std::int64_t now_ns) override;
  bool request_finished(EngineRequest& request, bool aborted, std::int64_t now_ns) override;
  void update_connector_output(const ConnectorOutput& output) override { scheduler_->done(output.jobs); }
  bool reset_cache() override;
  std::int64_t start_step(std::unique_ptr<ConnectorMetadata> meta, ConnectorOutput& output,
                          std::int64_t now_ns) override;
  bool has_pending_work() const override { return scheduler_->has_jobs() || scheduler_->has_ended_to_tell(); }
  void check() const override { scheduler_->check(); }

  // Add finished copies to the output: the requests of loads are received.
  void report(std::vector<JobId> done, ConnectorOutput& output) const;

 private:
  std::unique_ptr<OffloadConnector> scheduler_;
  bool grouped_;
  bool notes_pulls_;
  std::unique_ptr<OffloadLinks> links_;
  std::unique_ptr<OffloadSteps> steps_;
};

}  // namespace understudy
