// Construction of an engine's connector: vLLM's offload, hand-offs, both, one of the user's, or none.
#include <memory>
#include <utility>
#include <vector>

#include "engine/vllm/engine.hpp"
#include "engine/vllm/groups/group_offload.hpp"

namespace understudy {

std::unique_ptr<Connector> VllmEngine::make_offloading() {
  const VllmOffload& settings = *config_.offload;
  std::unique_ptr<OffloadConnector> scheduler;
  if (grouped_ != nullptr) {
    scheduler = std::make_unique<GroupOffload>(settings, *grouped_->blocks(), config_.num_gpu_blocks, store_);
  } else {
    scheduler = std::make_unique<OffloadConnector>(settings, config_.block_size, config_.enable_prefix_caching, store_,
                                                   config_.num_gpu_blocks);
  }
  auto connector =
      std::make_unique<OffloadingConnector>(std::move(scheduler), grouped_ != nullptr, config_.transfer.has_value());
  parts_.offloading = connector.get();
  offload_ = &connector->scheduler();
  if (tiers_) {
    connector->use_links(std::make_unique<OffloadLinks>(tiers_->hub(), tiers_->host_links(), tiers_->config().host,
                                                        tiers_->config().bytes_per_block,
                                                        settings.samples ? &offload_->samples() : nullptr));
  } else if (!config_.multi) {  // else a driver of recorded steps copies
    connector->use_steps(std::make_unique<OffloadSteps>(settings.store_steps, settings.load_steps));
  }
  offload_links_ = connector->links();
  parts_.steps = connector->steps();
  return connector;
}

std::unique_ptr<Connector> VllmEngine::make_nixl(const EngineSite& site) {
  parts_.net = site.net;
  const auto worker = static_cast<std::uint32_t>(site.worker);
  auto connector = std::make_unique<NixlConnector>(*config_.transfer, config_.block_size, parts_.net, worker);
  parts_.nixl = connector.get();
  parts_.sender = connector->sender();
  parts_.receiver = connector->receiver();
  return connector;
}

std::unique_ptr<Connector> VllmEngine::make_connector(const EngineSite& site) {
  if (config_.connector) return config_.connector(config_);
  if (!config_.transfer && !config_.offload) return std::make_unique<NoConnector>();
  if (!config_.offload) return make_nixl(site);
  if (!config_.transfer) return make_offloading();
  const VllmMulti settings = config_.multi.value_or(VllmMulti{config_.transfer->consumes});
  std::vector<std::unique_ptr<Connector>> children;
  children.push_back(make_nixl(site));
  children.push_back(make_offloading());
  if (settings.host_first) std::swap(children[0], children[1]);
  auto connector = std::make_unique<MultiConnector>(std::move(children), settings.log);
  parts_.multi = connector.get();
  return connector;
}

}  // namespace understudy
