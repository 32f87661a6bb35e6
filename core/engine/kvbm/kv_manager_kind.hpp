// The two block managers: Dynamo's KVBM and vLLM's own.
#pragma once

#include <cstdint>

namespace understudy {

// How a block manager assigns blocks to requests.
enum class KvManagerKind : std::uint8_t {
  Kvbm,    // Dynamo's: one physical block per hash, visible as soon as it is acquired
  Native,  // vLLM's: several copies of a hash may exist, each visible once its last token is scheduled
};

}  // namespace understudy
