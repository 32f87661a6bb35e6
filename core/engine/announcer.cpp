#include "engine/announcer.hpp"

namespace understudy {

void Announcer::show(std::int64_t now_ns) {
  if (!on_) return;
  unpublished_.expire();
  if (names_only(config_)) {
    if (holds_) {
      read_changes([&](std::span<const EventRecord> changes) { log_.add(changes); });
    } else {
      read_changes([](std::span<const EventRecord>) {});
      log_.forget_hidden();
    }
    return;
  }
  std::span<const EventRecord> shown;
  read_changes([&](std::span<const EventRecord> changes) { shown = log_.show(changes, now_ns, !holds_); });
  if (shown.empty()) return;
  if (const Residency* const cache = followed(); config_.check && cache != nullptr) {
    truth_.apply(shown, now_ns);
    truth_.require_equal(*cache, EventTruth::Scope::Below);
  }
  if (!config_.events) log_.take_visible(discarded_);
}

void Announcer::add_unread() {
  if (source_ == nullptr) {
    log_.add(store_.drain_events(~std::size_t{0}));
    return;
  }
  log_.add(source_->unread());
  source_->clear();
}

DrainedEvents Announcer::take_all() {
  add_unread();
  return log_.take_all();
}

DrainedEvents Announcer::peek_new() {
  add_unread();
  return log_.peek_new();
}

std::size_t Announcer::published_prefix(std::span<const BlockIdentity> blocks, std::size_t known) {
  const std::size_t found = find_published(blocks, known);
  if (config_.check && on_) truth_.require_prefix(blocks, found);
  return found;
}

std::size_t Announcer::find_published(std::span<const BlockIdentity> blocks, std::size_t known) {
  if (!on_) return 0;
  unpublished_.follow(log_.hidden(), source_ == nullptr ? store_.peek_events() : source_->unread());
  if (unpublished_.empty()) return prefix_length(blocks, known);
  while (known < blocks.size()) {
    const std::size_t there = prefix_length(blocks, known);
    for (; known < there; ++known) {
      if (unpublished_.of(blocks[known]) == UnpublishedChanges::Was::Absent) return known;
    }
    if (known == blocks.size() || unpublished_.of(blocks[known]) != UnpublishedChanges::Was::There) return known;
    ++known;  // removed by the step in progress
  }
  return known;
}

void Announcer::check(EventTruth::Scope scope) {
  if (!config_.check || !on_) return;
  if (const Residency* const cache = followed(); cache != nullptr) {
    truth_.require_equal(*cache, scope);
  } else if (scope == EventTruth::Scope::Whole) {
    source_->check();
  }
}

}  // namespace understudy
