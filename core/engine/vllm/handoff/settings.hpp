// Settings of vLLM's NixlConnector, which hands KV blocks from a prefill instance to a decode instance.
#pragma once

#include <cstdint>

namespace understudy {

struct VllmTransfer {
  bool produces = false;      // kv_role kv_producer or kv_both: keeps the blocks of finished prefills
  bool consumes = false;      // kv_role kv_consumer or kv_both: pulls the blocks of its prompts
  bool recomputes = false;    // kv_load_failure_policy: recompute; else the request fails
  std::int64_t lease_s = 30;  // kv_lease_duration
  bool log = false;           // keep a log of each step, in the format of a recording
};

}  // namespace understudy
