// Settings of vLLM's native host offload, and differences between its releases.
#pragma once

#include <cstdint>
#include <string>

#include "tiers/host_order.hpp"

namespace understudy {

struct VllmOffload {
  std::uint64_t host_chunks = 0;
  std::uint32_t blocks_per_chunk = 1;
  HostPolicy policy = HostPolicy::Lru;
  bool prompt_only = true;  // outputs are not stored
  // In lockstep, without links: how many steps a transfer takes.
  std::uint32_t store_steps = 0;
  std::uint32_t load_steps = 0;

  // Version profile.
  std::string release;            // name used in messages
  bool touches = true;            // lookups and stores mark chunks as recently used; else the end of a request does
  bool arc_falls_back = false;    // if no frequent chunk is evictable, evict a recent one, however few there are
  bool stores_last_token = true;  // a finished request also offers its last token, which was never computed
  bool holders_first = false;     // waiting requests that hold blocks have their own queue, served first
  bool spares_in_flight = false;  // a victim whose step is in flight is not preempted
  bool ranks = false;             // LRU ranks chunks by the request that used them last
  bool offers_again = false;      // a request that is looked up offers all its chunks again

  bool log = false;      // keep a log of each step, in the format of a recording
  bool samples = false;  // keep samples for the histograms of a server, until taken
};

}  // namespace understudy
