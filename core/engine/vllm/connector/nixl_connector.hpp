// vLLM's NixlConnector: blocks of finished prompts are kept for a peer, and blocks that a peer keeps are pulled.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/handoff_net.hpp"
#include "engine/vllm/connector/connector.hpp"
#include "engine/vllm/handoff/log.hpp"
#include "engine/vllm/handoff/receiver.hpp"
#include "engine/vllm/handoff/sender.hpp"

namespace understudy {

class NixlConnector final : public Connector {
 public:
  // `net`: null, where the driver of recorded steps moves the blocks.
  NixlConnector(const VllmTransfer& settings, std::uint32_t block_size, HandOffNet* net, std::uint32_t worker);

  KvSender* sender() noexcept { return sender_ ? &*sender_ : nullptr; }          // null: it keeps no blocks for others
  KvReceiver* receiver() noexcept { return receiver_ ? &*receiver_ : nullptr; }  // null: it pulls none of others
  HandOffLog& log() noexcept { return log_; }

  bool loads() const noexcept override { return receiver_.has_value(); }
  bool produces() const noexcept override { return sender_.has_value(); }
  bool consumes() const noexcept override { return receiver_.has_value(); }
  void on_new_request(const EngineRequest& request) override;
  std::optional<std::uint32_t> get_num_new_matched_tokens(EngineRequest& request, std::uint32_t local,
                                                          std::int64_t now_ns) override;
  void update_state_after_alloc(EngineRequest& request, std::uint32_t local, std::uint32_t external,
                                std::int64_t now_ns) override;
  HitSource get_external_cache_hit_source(RequestId) const override { return HitSource::Peer; }
  std::unique_ptr<ConnectorMetadata> build_connector_meta(std::int64_t now_ns) override;
  bool request_finished(EngineRequest& request, bool aborted, std::int64_t now_ns) override;
  void update_connector_output(const ConnectorOutput& output) override;
  void poll(ConnectorOutput& output, std::int64_t now_ns) override;
  bool polls() const noexcept override { return net_ != nullptr; }
  std::int64_t next_event_ns() const override;
  bool sends_at(std::int64_t now_ns) const override;
  bool has_failed() const override { return net_ != nullptr && net_->has_failed(worker_); }
  bool has_pending_work() const override;

 private:
  void post(const ReceiveOrders& orders, std::int64_t now_ns);
  void poll_sender(ConnectorOutput& output, std::int64_t now_ns);

  VllmTransfer settings_;
  std::uint32_t block_size_;
  HandOffNet* net_;
  std::uint32_t worker_;  // in the net
  std::optional<KvSender> sender_;
  std::optional<KvReceiver> receiver_;
  HandOffLog log_;
  std::vector<SlotId> ids_;  // scratch
};

}  // namespace understudy
