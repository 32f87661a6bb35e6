// A KV connector: prompts whose KV may come from elsewhere, and blocks that others still read. The interface is vLLM's
// KVConnectorBase_V1; the engine calls it in the order of a schedule, and knows no connector by name.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/vllm/connector/output.hpp"
#include "engine/vllm/live_request.hpp"

namespace understudy {

// A request of a schedule, as a connector sees it.
struct ScheduledEntry {
  EngineRequest& request;  // with the tokens that it will have computed
  bool admitted = false;   // in this schedule
  bool resumed = false;
};

// Where loaded tokens come from.
enum class HitSource : std::uint8_t { Host, Peer };

class Connector {
 public:
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

  virtual ~Connector() = default;

  // ── Roles ──
  // Prompts may come from elsewhere.
  virtual bool loads() const noexcept { return false; }
  // Keeps blocks of finished prompts for a peer, and pulls blocks from one.
  virtual bool produces() const noexcept { return false; }
  virtual bool consumes() const noexcept { return false; }
  // A preempted request computes its output in flight again (vLLM: requires_kv_delivery).
  bool requires_kv_delivery() const noexcept { return produces(); }

  // ── Scheduler ──
  virtual void on_new_request(const EngineRequest&) {}
  // Tokens behind `local` ones (found on the device) that can be loaded; none: ask again in the next schedule. The
  // request has computed no token.
  virtual std::optional<std::uint32_t> get_num_new_matched_tokens(EngineRequest&, std::uint32_t /*local*/,
                                                                  std::int64_t /*now_ns*/) {
    return 0;
  }
  // Whether fewer tokens than it found can be loaded.
  virtual bool can_load(const EngineRequest&, std::uint32_t /*local*/, std::uint32_t /*tokens*/) { return true; }
  // The request has blocks: begin to load `external` tokens behind `local` ones, or none (0).
  virtual void update_state_after_alloc(EngineRequest&, std::uint32_t /*local*/, std::uint32_t /*external*/,
                                        std::int64_t /*now_ns*/) {}
  // Of the last load of a request.
  virtual HitSource get_external_cache_hit_source(RequestId) const { return HitSource::Host; }
  // The request is about to lose its blocks.
  virtual void handle_preemption(const EngineRequest&) {}
  // A schedule ends: these requests are in its batch.
  virtual void on_scheduled(const ScheduledEntry&) {}
  // The orders of the schedule to the worker; null: none.
  virtual std::unique_ptr<ConnectorMetadata> build_connector_meta(std::int64_t /*now_ns*/) { return nullptr; }
  // The request ends. True: its blocks must be kept until the request is reported as sent.
  virtual bool request_finished(EngineRequest&, bool /*aborted*/, std::int64_t /*now_ns*/) { return false; }
  // The update of a batch reads what the worker has reported with it.
  virtual void update_connector_output(const ConnectorOutput&) {}
  // Drop everything that is stored and not kept for a peer (vLLM: reset_cache). False: it cannot.
  virtual bool reset_cache() { return true; }

  // ── Worker ──
  // What the worker's poll finds right after it was given the orders of a schedule.
  virtual void poll(ConnectorOutput&, std::int64_t /*now_ns*/) {}
  // A batch begins, with the orders of its schedule. Adds what is done at once; returns when the batch can compute.
  virtual std::int64_t start_step(std::unique_ptr<ConnectorMetadata>, ConnectorOutput&, std::int64_t now_ns) {
    return now_ns;
  }

  // ── Time ──
  // Without tokens to compute the engine sleeps, and polls when something may have happened.
  virtual bool polls() const noexcept { return false; }
  // When a poll may find something, or something is to be sent, as far as is known. Before that time schedules that
  // admit no request mean nothing to it.
  virtual std::int64_t next_event_ns() const { return kNever; }
  // Whether the next schedule may send something to another worker, so that it must not be run ahead of time.
  virtual bool sends_at(std::int64_t /*now_ns*/) const { return false; }
  // Whether a load has failed that no poll has seen.
  virtual bool has_failed() const { return false; }

  // ── Watch ──
  // Whether the engine must go on without requests.
  virtual bool has_pending_work() const { return false; }
  virtual void check() const {}
};

// The default: everything is computed here.
class NoConnector final : public Connector {};

}  // namespace understudy
