// Sessions between their requests: a policy decides what happens to their KV, and workers do it.
#include <algorithm>
#include <utility>

#include "replay/fleet.hpp"

namespace understudy {

void Fleet::open_sessions() {
  if (!config_.session_policy) return;
  if (net_ || steps_with_others() || config_.lockstep_ns > 0) {
    throw Error(ErrorKind::ConfigError, "session_kv does not work with ",
                net_                  ? "prefill and decode pools"
                : steps_with_others() ? "ranks that step together"
                                      : "lockstep",
                " yet; leave one of them out");
  }
  for (const Pool& pool : pools_) {
    const auto* keeper = dynamic_cast<const PrefixKeeper*>(workers_[pool.first_worker].engine.get());
    const std::optional<std::string> why = keeper == nullptr
                                               ? std::optional<std::string>("the engine does not keep KV of sessions")
                                               : keeper->why_no_prefixes();
    if (why) throw Error(ErrorKind::ConfigError, "session_kv: ", *why, "; leave it out, or change the engine");
  }
  sessions_ = std::make_unique<SessionKeeper>(config_.session_policy);
}

// A request of the session arrives: it sleeps no longer. Its hold stays until the request has ended.
void Fleet::wake_session(std::uint64_t row) {
  SessionKeeper::Session& session = sessions_->of(session_of(row));
  if (session.is_asleep) {
    session.last_gap_ns = now_ns_ - session.since_ns;
  } else if (session.open == 0) {
    session.last_gap_ns = -1;
  }
  session.is_asleep = false;
  ++session.open;
  cancel_entry(session.timer);
}

// A request has ended, and the session sleeps unless another of its requests is open. The policy is asked at this time,
// but after everything that ends now.
void Fleet::put_to_sleep(std::uint64_t row) {
  SessionKeeper::Session& session = sessions_->of(session_of(row));
  if (session.open > 0) --session.open;
  if (worker_of_[row] >= 0 && !session.has_begun) {
    session.has_begun = true;
    session.first_cached_tokens = static_cast<std::uint32_t>(columns_.result().cached_tokens_first[row]);
  }
  if (session.open > 0) return;
  cancel_entry(session.timer);
  session.row = row;
  session.since_ns = now_ns_;
  session.worker = worker_of_[row];
  session.is_asleep = session.worker >= 0;
  if (!session.is_asleep) return;  // it was rejected
  session.timer = queue_.push(now_ns_, EventClass::Session, row, session_of(row));
}

void Fleet::ask_session(std::uint64_t id) {
  SessionKeeper::Session& session = sessions_->of(id);
  session.timer = EventQueue::kNone;
  if (!session.is_asleep) return;
  const std::uint64_t row = session.row;
  if (session.since_ns == now_ns_ && session.holder >= 0 && session.holder != session.worker) {
    keep_prefix(id, PrefixAction::Unhold);  // it has moved
  }
  SessionSleep sleep;
  sleep.now_ns = now_ns_;
  sleep.row = row;
  sleep.session = id;
  sleep.parent_session = parent_of(id);
  sleep.worker = static_cast<WorkerId>(session.worker);
  sleep.prompt_tokens = static_cast<std::uint32_t>(workload_.prompt_tokens[row]);
  sleep.output_tokens = static_cast<std::uint32_t>(columns_.result().output_tokens[row]);
  sleep.first_cached_tokens = session.first_cached_tokens;
  sleep.asleep_ns = now_ns_ - session.since_ns;
  if (session.last_gap_ns >= 0) sleep.last_gap_ns = session.last_gap_ns;
  sleep.is_last = workload_.next_turn[row] < 0;
  sleep.told_ns = told_gap_ns(row);
  const bool held = session.holder >= 0;
  const SessionOrder order = sessions_->ask(sleep);
  const auto orders = [&](PrefixAction action) { return std::ranges::count(order.actions, action) > 0; };
  if (held && sleep.asleep_ns == 0 && !orders(PrefixAction::Hold) && !orders(PrefixAction::Drop)) {
    keep_prefix(id, PrefixAction::Unhold);  // a hold ends with the next request, unless it is renewed
  }
  for (const PrefixAction action : order.actions) keep_prefix(id, action);
  if (!order.again_ns || ended_ == workload_.size()) return;
  if (*order.again_ns <= 0) {
    throw Error(ErrorKind::PolicyError, "the session policy asks to be called again after ", *order.again_ns,
                " ns; give a time above 0");
  }
  if (*order.again_ns < Engine::kNever - now_ns_) {
    session.timer = queue_.push(now_ns_ + *order.again_ns, EventClass::Session, row, id);
  }
}

void Fleet::keep_prefix(std::uint64_t id, PrefixAction action) {
  SessionKeeper::Session& session = sessions_->of(id);
  const bool ends = action == PrefixAction::Unhold || (action == PrefixAction::Drop && session.holder >= 0);
  const auto worker = static_cast<std::size_t>(ends ? session.holder : session.worker);
  if (ends && session.holder < 0) return;
  if (!workers_[worker].engine) return;  // it has left the fleet, with its cache
  if (action == PrefixAction::Hold) session.holder = session.worker;
  if (ends) session.holder = -1;
  PrefixCall call;
  call.action = action;
  call.session = id;
  call.identities = identities_of(session.row, config_of(worker));
  call.tokens =
      static_cast<std::uint32_t>(workload_.prompt_tokens[session.row] + columns_.result().output_tokens[session.row]);
  call.kept_tokens = session.first_cached_tokens;
  sync_worker(worker);
  leave_sleepers(worker);
  absorb(worker, dynamic_cast<PrefixKeeper&>(*workers_[worker].engine).keep_prefix(call, now_ns_));
  after_input(worker);
}

// Session that started this one: that of the request on which its first one waits.
std::optional<std::uint64_t> Fleet::parent_of(std::uint64_t session) const {
  const GraphColumns& graph = workload_.graph;
  if (graph.empty()) return std::nullopt;
  const auto begin = static_cast<std::size_t>(graph.dependency_offsets[session]);
  const auto end = static_cast<std::size_t>(graph.dependency_offsets[session + 1]);
  std::optional<std::uint64_t> parent;
  for (std::size_t edge = begin; edge < end; ++edge) {
    const std::uint64_t other = session_of(static_cast<std::uint64_t>(graph.dependency_rows[edge]));
    if (other == session) continue;
    if (graph.dependency_relations[edge] == GraphColumns::kSpawn) return other;
    if (!parent) parent = other;
  }
  return parent;
}

// Time from the end of a request to the next one of its session, where that waits for this answer alone.
std::optional<std::int64_t> Fleet::told_gap_ns(std::uint64_t row) {
  if (workload_.next_turn[row] < 0) return std::nullopt;
  const auto next = static_cast<std::size_t>(workload_.next_turn[row]);
  const GraphColumns& graph = workload_.graph;
  if (graph.empty()) return workload_.delay_ns[next];
  std::optional<std::int64_t> gap;
  for (auto edge = static_cast<std::size_t>(graph.dependency_offsets[next]);
       edge < static_cast<std::size_t>(graph.dependency_offsets[next + 1]); ++edge) {
    const auto on = static_cast<std::uint64_t>(graph.dependency_rows[edge]);
    const bool completes = graph.dependency_triggers[edge] == static_cast<std::uint8_t>(PlayStates::Event::Completion);
    if (on == row && completes) {
      gap = graph.dependency_delay_ns[edge];
    } else if (arrival_ns_[on] < 0 || (completes && columns_.result().finish_ns[on] < 0)) {
      return std::nullopt;
    }
  }
  return gap;
}

}  // namespace understudy
