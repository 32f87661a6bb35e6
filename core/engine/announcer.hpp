// What an engine says about its blocks, and when: of the device at the end of a step, of tiers below at once.
#pragma once

#include <cstdint>
#include <span>

#include "engine/config.hpp"
#include "engine/unpublished_changes.hpp"
#include "events/event_log.hpp"
#include "events/event_truth.hpp"
#include "store/block_store.hpp"

namespace understudy {

// Takes what the store tells. With `check`, an index that knows nothing else must agree with the store.
class Announcer {
 public:
  Announcer(const EngineConfig& config, BlockStore& store) : config_(config), store_(store) {}

  // Whether the store tells what happens. Without prefix caching there is nothing that anybody could use.
  static bool wanted(const EngineConfig& config) {
    return (config.events || config.check || config.published_blocks) && config.enable_prefix_caching;
  }
  // Of a block no more than its name: rows matter only until they could be shown.
  static bool names_only(const EngineConfig& config) { return !config.events && !config.check; }
  EngineEventLog* log() noexcept { return on_ ? &log_ : nullptr; }

  // ── Steps ──
  // Rows of the device are those of a step that has not ended, from now on.
  void hold() noexcept { holds_ = true; }
  // They are not: what comes next is nobody's.
  void stop_holding() noexcept { holds_ = false; }
  bool holds() const noexcept { return holds_; }
  // What happened to blocks since the last call is visible from now on; on the device, unless that is held back.
  void show(std::int64_t now_ns);
  void release(std::int64_t now_ns) {
    stop_holding();
    show(now_ns);
  }

  // ── For those who listen ──
  bool has_visible() const noexcept { return log_.has_visible(); }
  void take_visible(TimedEvents& out) { log_.take_visible(out); }
  DrainedEvents take_all();  // those of the step in progress too, as the store tells them
  DrainedEvents peek_new();  // the same, and they stay to be taken
  void keep_taken() noexcept { log_.keep_taken(); }
  void forget_taken() noexcept { log_.forget_taken(); }

  // Leading blocks that are on the device as far as `show` has let anybody know: not what the step in progress has
  // changed. For an engine without tiers.
  std::size_t published_prefix(std::span<const BlockIdentity> blocks);

  // InvariantViolated when rows and blocks contradict each other.
  void check(EventTruth::Scope scope);

 private:
  const EngineConfig& config_;
  BlockStore& store_;
  const bool on_ = wanted(config_);
  EngineEventLog log_;
  bool holds_ = false;
  UnpublishedChanges unpublished_;
  TimedEvents discarded_;  // what nobody but `check` listens to; its room
  EventTruth truth_;
};

}  // namespace understudy
