// Publishes an engine's block changes: those of the device at the end of a step, those of lower tiers at once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/config.hpp"
#include "engine/unpublished_changes.hpp"
#include "events/event_log.hpp"
#include "events/event_truth.hpp"
#include "store/block_store.hpp"

namespace understudy {

// Block changes of a cache that is not the store.
class EventSource {
 public:
  virtual ~EventSource() = default;
  virtual std::span<const EventRecord> unread() = 0;
  virtual void clear() = 0;        // marks them as read
  virtual void check() const = 0;  // InvariantViolated when rows and blocks contradict each other
  // The cache, if its rows are those of single blocks that an index could follow.
  virtual const Residency* followed() const noexcept { return nullptr; }
  virtual std::size_t prefix_length(std::span<const BlockIdentity>) const { return 0; }  // with `followed`
};

// Reads the store's events, or those of a source. With `check`, an index that knows only these events must agree with
// the store, or with the source's cache.
class Announcer {
 public:
  Announcer(const EngineConfig& config, BlockStore& store) : config_(config), store_(store) {}

  // Whether the store records events. Without prefix caching no reader could use them.
  static bool wanted(const EngineConfig& config) {
    return (config.events || config.check || config.published_blocks) && config.enable_prefix_caching;
  }
  // Record only a block's name: rows matter only until they are published.
  static bool names_only(const EngineConfig& config) { return !config.events && !config.check; }
  void read_from(EventSource& source) noexcept { source_ = &source; }
  EngineEventLog* log() noexcept { return on_ ? &log_ : nullptr; }

  // ── Steps ──
  // Rows of the device are those of a step that has not ended, from now on.
  void hold() noexcept { holds_ = true; }
  // Stop holding back: later changes belong to no step.
  void stop_holding() noexcept { holds_ = false; }
  bool holds() const noexcept { return holds_; }
  // Publish block changes since the last call; those on the device unless they are held back.
  void show(std::int64_t now_ns);
  void release(std::int64_t now_ns) {
    stop_holding();
    show(now_ns);
  }

  // ── For listeners ──
  bool has_visible() const noexcept { return log_.has_visible(); }
  void take_visible(TimedEvents& out) { log_.take_visible(out); }
  DrainedEvents take_all();  // including the step in progress, as the store recorded them
  DrainedEvents peek_new();  // the same, without taking them
  void keep_taken() noexcept { log_.keep_taken(); }
  void forget_taken() noexcept { log_.forget_taken(); }

  // Leading blocks on the device as published by `show`: without changes of the step in progress. The first `known` are
  // among them. For an engine without tiers.
  std::size_t published_prefix(std::span<const BlockIdentity> blocks, std::size_t known);

  // InvariantViolated when rows and blocks contradict each other.
  void check(EventTruth::Scope scope);

 private:
  template <typename Read>
  void read_changes(Read read) {
    if (source_ == nullptr) {
      store_.read_events(read);
    } else {
      read(source_->unread());
      source_->clear();
    }
  }
  void add_unread();
  const Residency* followed() const noexcept { return source_ == nullptr ? &store_ : source_->followed(); }
  // Leading blocks that are cached, those before `known` or more of them unseen.
  std::size_t prefix_length(std::span<const BlockIdentity> blocks, std::size_t known) const {
    if (source_ == nullptr) return known + store_.prefix_length(0, blocks.subspan(known));
    return std::max(known, source_->prefix_length(blocks));
  }
  std::size_t find_published(std::span<const BlockIdentity> blocks, std::size_t known);

  const EngineConfig& config_;
  BlockStore& store_;
  EventSource* source_ = nullptr;  // instead of the store
  const bool on_ = wanted(config_);
  EngineEventLog log_;
  bool holds_ = false;
  UnpublishedChanges unpublished_;
  TimedEvents discarded_;  // events that only `check` reads; a reused buffer
  EventTruth truth_;
};

}  // namespace understudy
