// Settings of vLLM's MultiConnector over its NixlConnector and its OffloadingConnector.
#pragma once

namespace understudy {

struct VllmMulti {
  bool consumes = false;    // its own kv_role, kv_consumer or kv_both: blocks wait for steps in flight
  bool host_first = false;  // the order of the connectors
  bool log = false;         // keep a log of each step, in the format of a recording
};

}  // namespace understudy
