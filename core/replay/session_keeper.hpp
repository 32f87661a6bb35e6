// What a policy reads of a sleeping session, and what it orders for its KV.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <unordered_map>
#include <vector>

#include "engine/prefix_keeper.hpp"
#include "replay/event_queue.hpp"
#include "router/worker.hpp"

namespace understudy {

// A session after one of its requests has ended, and before the next arrives.
struct SessionSleep {
  std::int64_t now_ns = 0;
  std::uint64_t row = 0;  // the request that has ended
  std::uint64_t session = 0;
  std::optional<std::uint64_t> parent_session;
  WorkerId worker = 0;
  std::uint32_t prompt_tokens = 0;
  std::uint32_t output_tokens = 0;
  std::uint32_t first_cached_tokens = 0;    // of its first request: what was there before the session
  std::int64_t asleep_ns = 0;               // since the request has ended
  std::optional<std::int64_t> last_gap_ns;  // from the answer before to the request that has ended
  bool is_last = false;                     // no request of the session follows
  // Until the next request, if its client knows: after a tool, but not where it waits for other agents too.
  std::optional<std::int64_t> told_ns;
};

struct SessionOrder {
  std::vector<PrefixAction> actions;     // now, in this order
  std::optional<std::int64_t> again_ns;  // ask again so much later, if the session still sleeps
};

using SessionPolicy = std::function<SessionOrder(const SessionSleep&)>;

// Sessions of a run, by the row of their first request.
class SessionKeeper {
 public:
  struct Session {
    std::int64_t since_ns = 0;
    std::int64_t last_gap_ns = -1;
    std::uint64_t row = 0;
    std::uint32_t first_cached_tokens = 0;
    std::uint32_t open = 0;    // requests that have arrived and not ended
    std::int32_t worker = -1;  // of that row
    std::int32_t holder = -1;  // worker with its hold
    bool has_begun = false;
    bool is_asleep = false;
    EventQueue::Handle timer = EventQueue::kNone;
  };

  explicit SessionKeeper(SessionPolicy policy) : policy_(std::move(policy)) {}

  SessionOrder ask(const SessionSleep& sleep) const { return policy_(sleep); }
  Session& of(std::uint64_t session) { return sessions_[session]; }

 private:
  SessionPolicy policy_;
  std::unordered_map<std::uint64_t, Session> sessions_;
};

}  // namespace understudy
