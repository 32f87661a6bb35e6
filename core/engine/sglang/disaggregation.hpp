// Prefill/decode disaggregation: settings of one side, and the transport of KV between the two.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/request_id.hpp"

namespace understudy {

enum class SglangRole : std::uint8_t { Unified, Prefill, Decode };

struct SglangSideSettings {
  SglangRole role = SglangRole::Unified;
  std::optional<std::uint32_t> metadata_slots;  // nothing: 2 × max_running_requests
  bool early_send = true;                       // prefill: sends a cached prefix before the rest is computed
  std::uint32_t num_reserved_decode_tokens = 512;
  std::optional<std::uint32_t> extra_slots;  // decode: beyond max_running_requests; nothing: SGLang's rule
  std::uint32_t polling_interval = 1;
  bool decode_radix = false;                 // decode: has a radix cache
  bool backs_up_retracted = true;            // decode: their KV, to the host; else they are aborted
  std::optional<std::uint64_t> host_tokens;  // for these copies; nothing: without a limit

  std::uint32_t buffers(std::uint32_t max_running_requests) const {
    return metadata_slots.value_or(2 * max_running_requests);
  }
  std::uint32_t slots(std::uint32_t max_running_requests) const {
    if (role != SglangRole::Decode) return max_running_requests;
    return max_running_requests + extra_slots.value_or(max_running_requests <= 32 ? 2 * max_running_requests : 0);
  }
};

enum class SglangTransferState : std::uint8_t { Boot, Ready, Moving, Done, Failed };

// The other side, and the link to it. Both sides notice changes only when they poll.
class SglangTransport {
 public:
  virtual ~SglangTransport() = default;
  virtual SglangTransferState poll(RequestId id) = 0;
  virtual void fail(RequestId id) = 0;  // ended on this side

  // Prefill side.
  virtual std::uint32_t decode_prefix(RequestId id) = 0;  // leading tokens that the decode side has; whole pages
  virtual void send(RequestId id, std::uint32_t pages, bool last) = 0;
  virtual void end_sends(RequestId id) = 0;  // all that the decode side lacks is sent

  // Decode side.
  virtual void request_pages(RequestId id, std::uint32_t pages, std::uint32_t prefix) = 0;  // memory for them is there
  virtual void report_failure(RequestId id) = 0;                                            // to the prefill side
  virtual bool waits_for_drain() const = 0;   // whether that side acknowledges it
  virtual bool is_drained(RequestId id) = 0;  // it has: nothing is written to this request's pages any more
};

struct SglangRequest;

// Queues of one side.
struct SglangSide {
  std::vector<SglangRequest*> bootstrap;  // prefill: without a decode side yet; decode: without memory
  std::vector<SglangRequest*> moving;     // prefill: sent, not arrived; decode: KV not here yet
  std::vector<SglangRequest*> held;       // decode: failed, and their pages may still be written
  std::vector<SglangRequest*> retracted;  // decode: their KV is on the host
  std::uint32_t buffers = 0;              // free ones, for a request's first output and its metadata
  std::uint64_t host_tokens = 0;          // free ones, if limited
  std::uint32_t polls = 0;

  bool empty() const noexcept { return bootstrap.empty() && moving.empty() && held.empty() && retracted.empty(); }
};

}  // namespace understudy
