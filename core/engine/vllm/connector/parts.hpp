// The parts of an engine's connector that its own code, bindings and recorders call; null where it has none.
#pragma once

#include "engine/handoff_net.hpp"
#include "engine/vllm/connector/multi_connector.hpp"
#include "engine/vllm/connector/nixl_connector.hpp"
#include "engine/vllm/connector/offloading_connector.hpp"

namespace understudy {

struct ConnectorParts {
  NixlConnector* nixl = nullptr;
  MultiConnector* multi = nullptr;
  KvSender* sender = nullptr;
  KvReceiver* receiver = nullptr;
  OffloadingConnector* offloading = nullptr;
  OffloadSteps* steps = nullptr;
  HandOffNet* net = nullptr;  // null also where a driver of steps moves the blocks
};

}  // namespace understudy
